// Inductor's random numbers on a CPU (`normalized_rand_cpu`), a step of columns at a time.

namespace {

// 32-bit words, each in a 64-bit lane whose upper half nothing looks at: so one product gives both of its halves.
// `upper` moves the upper half down and `mixed` is a ^ b ^ c.
#if defined(CPU_CAPABILITY_AVX512)

struct Words {
  static constexpr int kSize = 8;
  __m512i lanes;

  static FUSEPASS_INLINE Words all(uint32_t word) { return {_mm512_set1_epi64(word)}; }
  static FUSEPASS_INLINE Words counting(uint32_t first) {
    return {_mm512_add_epi64(_mm512_set1_epi64(first), _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0))};
  }
  FUSEPASS_INLINE Words times(const Words& b) const { return {_mm512_mul_epu32(lanes, b.lanes)}; }
  FUSEPASS_INLINE Words upper() const { return {_mm512_shuffle_epi32(lanes, _MM_PERM_DDBB)}; }
  FUSEPASS_INLINE Words mixed(const Words& b, const Words& c) const {
    return {_mm512_ternarylogic_epi64(lanes, b.lanes, c.lanes, 0x96)};
  }
  FUSEPASS_INLINE void store(int32_t* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi64_epi32(lanes));
  }
};

#elif defined(CPU_CAPABILITY_AVX2)

struct Words {
  static constexpr int kSize = 4;
  __m256i lanes;

  static FUSEPASS_INLINE Words all(uint32_t word) { return {_mm256_set1_epi64x(word)}; }
  static FUSEPASS_INLINE Words counting(uint32_t first) {
    return {_mm256_add_epi64(_mm256_set1_epi64x(first), _mm256_set_epi64x(3, 2, 1, 0))};
  }
  FUSEPASS_INLINE Words times(const Words& b) const { return {_mm256_mul_epu32(lanes, b.lanes)}; }
  FUSEPASS_INLINE Words upper() const { return {_mm256_shuffle_epi32(lanes, 0xf5)}; }
  FUSEPASS_INLINE Words mixed(const Words& b, const Words& c) const {
    return {_mm256_xor_si256(_mm256_xor_si256(lanes, b.lanes), c.lanes)};
  }
  FUSEPASS_INLINE void store(int32_t* p) const {
    const __m256i even = _mm256_permutevar8x32_epi32(lanes, _mm256_set_epi32(7, 5, 3, 1, 6, 4, 2, 0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(even));
  }
};

#else

struct Words {
  static constexpr int kSize = 1;
  uint64_t lanes;

  static FUSEPASS_INLINE Words all(uint32_t word) { return {word}; }
  static FUSEPASS_INLINE Words counting(uint32_t first) { return {first}; }
  FUSEPASS_INLINE Words times(const Words& b) const { return {(lanes & 0xffffffff) * (b.lanes & 0xffffffff)}; }
  FUSEPASS_INLINE Words upper() const { return {lanes >> 32}; }
  FUSEPASS_INLINE Words mixed(const Words& b, const Words& c) const { return {lanes ^ b.lanes ^ c.lanes}; }
  FUSEPASS_INLINE void store(int32_t* p) const { *p = static_cast<int32_t>(lanes); }
};

#endif

static_assert(kLanes % Words::kSize == 0);

// Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with one seed: its low 32 bits.
class Philox {
  static constexpr int kRounds = 10;
  Words key0_[kRounds];
  Words key1_[kRounds];

 public:
  explicit Philox(int64_t seed) {
    for (int i = 0; i < kRounds; ++i) {
      key0_[i] = Words::all(static_cast<uint32_t>(seed) + i * 0x9E3779B9u);
      key1_[i] = Words::all(i * 0xBB67AE85u);
    }
  }

  // The first word of each counter (n, 0, 0, 0).
  FUSEPASS_INLINE Words operator()(const Words& n) const {
    const Words first = n.times(Words::all(0xD2511F53));  // the first round of (n, 0, 0, 0)
    Words c0 = key0_[0], c1 = Words::all(0), c2 = first.upper(), c3 = first;
#pragma GCC unroll 9
    for (int i = 1; i < kRounds; ++i) {
      const Words product0 = c0.times(Words::all(0xD2511F53));
      const Words product1 = c2.times(Words::all(0xCD9E8D57));
      c0 = product1.upper().mixed(c1, key0_[i]);
      c1 = product1;
      c2 = product0.upper().mixed(c3, key1_[i]);
      c3 = product0;
    }
    return c0;
  }
};

// Numbers `first`, `first + 1`, ... of a stream, modulo 2^32: uniform in [0, 1), 31 bits of each word.
FUSEPASS_INLINE Floats rand_cpu(const Philox& philox, int64_t first) {
  alignas(64) int32_t words[kLanes];
  for (int i = 0; i < kLanes; i += Words::kSize) {
    philox(Words::counting(static_cast<uint32_t>(first + i))).store(words + i);
  }
  Floats result;
  for (int i = 0; i < kVectors; ++i) {
    const auto bits = Vectorized<int32_t>::loadu(words + i * Vector::size()) & Vectorized<int32_t>(0x7FFFFFFF);
    result[i] = at::vec::convert<float>(bits) * Vector(4.6566127342e-10f);
  }
  return result;
}

}  // namespace
