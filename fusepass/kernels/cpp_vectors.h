// One step along a row, `kLanes` columns, as FP32 or FP64 vectors of at::vec; its loads and stores, which convert; and
// the few conversions for which at::vec has no fast form, by instruction set, with a plain loop for all others.

#include <torch/csrc/inductor/cpp_prefix.h>

#include <ATen/cpu/vec/vec.h>
#include <ATen/cpu/vec/functional.h>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using at::vec::Vectorized;
using at::vec::VectorizedN;
using c10::BFloat16;
using c10::Half;

#define FUSEPASS_INLINE inline __attribute__((always_inline))

// As many FP32 columns as fill one vector of 16-bit columns.
constexpr int kVectors = 2;
using Floats = VectorizedN<float, kVectors>;
using Doubles = VectorizedN<double, 2 * kVectors>;
constexpr int kLanes = Floats::size();
static_assert(Doubles::size() == kLanes && Vectorized<BFloat16>::size() == kLanes);

// How many columns of a step are inside the row.
struct AllLanes {
  static constexpr int count = kLanes;
};
struct FirstLanes {
  int count;
};

// ---- one FP32 vector: FP64 and back, rounded to BFloat16, to and from bools ----

using Vector = Vectorized<float>;
using Wide = Vectorized<double>;

#if defined(CPU_CAPABILITY_AVX512)

FUSEPASS_INLINE void widen(const Vector& a, Wide& low, Wide& high) {
  low = _mm512_cvtps_pd(_mm512_castps512_ps256(a));
  high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1));
}
FUSEPASS_INLINE Vector unwiden(const Wide& low, const Wide& high) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1);
}
FUSEPASS_INLINE Vector round_bf16(const Vector& a) {
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(_mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)), bits);
  up = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
  return _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(0xffff0000)));
}
FUSEPASS_INLINE Vectorized<BFloat16> pack_bf16(const Vector& low, const Vector& high) {
  alignas(64) static constexpr uint16_t kUpperHalves[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                            23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                            45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16(_mm512_castps_si512(low), _mm512_load_si512(kUpperHalves), _mm512_castps_si512(high));
}
FUSEPASS_INLINE Vector from_bf16(const __m256i& halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
FUSEPASS_INLINE Vector from_bools(const bool* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_maskz_mov_ps(_mm_test_epi8_mask(bytes, bytes), _mm512_set1_ps(1));
}
FUSEPASS_INLINE void to_bools(bool* p, const Vector& a) {
  const __mmask16 is_true = _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_maskz_set1_epi8(is_true, 1));
}

#elif defined(CPU_CAPABILITY_AVX2)

FUSEPASS_INLINE void widen(const Vector& a, Wide& low, Wide& high) {
  low = _mm256_cvtps_pd(_mm256_castps256_ps128(a));
  high = _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1));
}
FUSEPASS_INLINE Vector unwiden(const Wide& low, const Wide& high) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps(low)), _mm256_cvtpd_ps(high), 1);
}
FUSEPASS_INLINE Vector round_bf16(const Vector& a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(_mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)), bits);
  const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
  const __m256 kept = _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(0xffff0000)));
  return _mm256_blendv_ps(kept, nan, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
FUSEPASS_INLINE Vectorized<BFloat16> pack_bf16(const Vector& low, const Vector& high) {
  const __m256i low16 = _mm256_srli_epi32(_mm256_castps_si256(low), 16);
  const __m256i high16 = _mm256_srli_epi32(_mm256_castps_si256(high), 16);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(low16, high16), 0xd8);
}
FUSEPASS_INLINE Vector from_bools(const bool* p) {
  const __m256i words = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m256i is_false = _mm256_cmpeq_epi32(words, _mm256_setzero_si256());
  return _mm256_andnot_ps(_mm256_castsi256_ps(is_false), _mm256_set1_ps(1));
}
FUSEPASS_INLINE void to_bools(bool* p, const Vector& a) {
  const __m256i is_true = _mm256_castps_si256(_mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NEQ_UQ));
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(is_true), _mm256_extracti128_si256(is_true, 1));
  const __m128i bytes = _mm_and_si128(_mm_packs_epi16(words, words), _mm_set1_epi8(1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), bytes);
}

#else

FUSEPASS_INLINE void widen(const Vector& a, Wide& low, Wide& high) {
  alignas(64) float from[Vector::size()];
  alignas(64) double to[Vector::size()];
  a.store(from);
  for (int i = 0; i < Vector::size(); ++i) to[i] = from[i];
  low = Wide::loadu(to);
  high = Wide::loadu(to + Wide::size());
}
FUSEPASS_INLINE Vector unwiden(const Wide& low, const Wide& high) {
  alignas(64) double from[Vector::size()];
  alignas(64) float to[Vector::size()];
  low.store(from);
  high.store(from + Wide::size());
  for (int i = 0; i < Vector::size(); ++i) to[i] = static_cast<float>(from[i]);
  return Vector::loadu(to);
}
FUSEPASS_INLINE Vectorized<BFloat16> pack_bf16(const Vector& low, const Vector& high) {
  return at::vec::convert_from_float<BFloat16>(low, high);
}
FUSEPASS_INLINE Vector round_bf16(const Vector& a) {
  return std::get<0>(at::vec::convert_to_float<BFloat16>(pack_bf16(a, a)));
}
FUSEPASS_INLINE Vector from_bools(const bool* p) {
  alignas(64) float to[Vector::size()];
  for (int i = 0; i < Vector::size(); ++i) to[i] = p[i] ? 1 : 0;
  return Vector::loadu(to);
}
FUSEPASS_INLINE void to_bools(bool* p, const Vector& a) {
  alignas(64) float from[Vector::size()];
  a.store(from);
  for (int i = 0; i < Vector::size(); ++i) p[i] = from[i] != 0;
}

#endif

// ---- conversions of a step, and of one number ----

FUSEPASS_INLINE Doubles to_doubles(const Floats& a) {
  Doubles result;
  for (int i = 0; i < kVectors; ++i) widen(a[i], result[2 * i], result[2 * i + 1]);
  return result;
}
FUSEPASS_INLINE Doubles to_doubles(const Doubles& a) { return a; }

FUSEPASS_INLINE Floats to_floats(const Doubles& a) {
  Floats result;
  for (int i = 0; i < kVectors; ++i) result[i] = unwiden(a[2 * i], a[2 * i + 1]);
  return result;
}
FUSEPASS_INLINE Floats to_floats(const Floats& a) { return a; }
FUSEPASS_INLINE float to_floats(double a) { return static_cast<float>(a); }

// A step that has been rounded to BFloat16 or Half: as FP32 to compute with, and as it is stored.
template <typename T>
struct Rounded {
  Floats floats;
  VectorizedN<T, 1> packed;
};

// Rounds to nearest, ties to even.
template <typename T>
FUSEPASS_INLINE Rounded<T> round_and_pack(const Floats& a) {
  const VectorizedN<T, 1> packed = at::vec::convert<T, 1, float, 2>(a);
  return {at::vec::convert<float, 2, T, 1>(packed), packed};
}
template <>
FUSEPASS_INLINE Rounded<BFloat16> round_and_pack(const Floats& a) {
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
  // The instruction takes subnormal numbers for zero: a step that has one goes the other way.
  constexpr int kSubnormal = 0x20;
  const __mmask16 any = _mm512_fpclass_ps_mask(a[0], kSubnormal) | _mm512_fpclass_ps_mask(a[1], kSubnormal);
  const __m512i packed = __builtin_expect(any, 0) ? __m512i(pack_bf16(round_bf16(a[0]), round_bf16(a[1])))
                                                  : __m512i(_mm512_cvtne2ps_pbh(a[1], a[0]));
  const Floats floats(from_bf16(_mm512_castsi512_si256(packed)), from_bf16(_mm512_extracti64x4_epi64(packed, 1)));
  return {floats, Vectorized<BFloat16>(packed)};
#else
  const Floats floats(round_bf16(a[0]), round_bf16(a[1]));
  return {floats, pack_bf16(floats[0], floats[1])};
#endif
}

template <typename T>
FUSEPASS_INLINE Floats round_to(const Floats& a) { return round_and_pack<T>(a).floats; }
template <typename T>
FUSEPASS_INLINE float round_to(float a) { return static_cast<float>(static_cast<T>(a)); }

// ---- memory ----

template <typename V, typename T>
FUSEPASS_INLINE V load_as(const T* p, AllLanes) { return V::loadu(p); }
template <typename V, typename T>
FUSEPASS_INLINE V load_as(const T* p, FirstLanes n) { return V::loadu(p, n.count); }

template <typename Lanes>
FUSEPASS_INLINE Floats load(const float* p, Lanes n) { return load_as<Floats>(p, n); }
template <typename Lanes>
FUSEPASS_INLINE Doubles load(const double* p, Lanes n) { return load_as<Doubles>(p, n); }
template <typename T, typename Lanes>
FUSEPASS_INLINE Floats load(const T* p, Lanes n) {
  return at::vec::convert<float, 2, T, 1>(load_as<VectorizedN<T, 1>>(p, n));
}
#if defined(CPU_CAPABILITY_AVX512)
FUSEPASS_INLINE Floats load(const BFloat16* p, AllLanes) {
  const __m256i* halves = reinterpret_cast<const __m256i*>(p);
  return Floats(from_bf16(_mm256_loadu_si256(halves)), from_bf16(_mm256_loadu_si256(halves + 1)));
}
#endif
FUSEPASS_INLINE Floats load(const bool* p, AllLanes) { return Floats(from_bools(p), from_bools(p + Vector::size())); }
FUSEPASS_INLINE Floats load(const bool* p, FirstLanes n) {
  bool all[kLanes] = {};
  std::memcpy(all, p, n.count);
  return load(all, AllLanes{});
}

template <typename T, typename V>
FUSEPASS_INLINE void store_as(T* p, const V& a, AllLanes) { a.store(p); }
template <typename T, typename V>
FUSEPASS_INLINE void store_as(T* p, const V& a, FirstLanes n) { a.store(p, n.count); }

// A step goes to memory as it is: its values are T's already, or not 0 where T is bool. What is quantised is rounded here.
template <typename Lanes>
FUSEPASS_INLINE void store(float* p, const Floats& a, Lanes n) { store_as(p, a, n); }
template <typename Lanes>
FUSEPASS_INLINE void store(double* p, const Doubles& a, Lanes n) { store_as(p, a, n); }
template <typename Lanes>
FUSEPASS_INLINE void store(BFloat16* p, const Floats& a, Lanes n) { store_as(p, pack_bf16(a[0], a[1]), n); }
template <typename Lanes>
FUSEPASS_INLINE void store(Half* p, const Floats& a, Lanes n) { store_as(p, at::vec::convert<Half, 1, float, 2>(a), n); }
template <typename T, typename Lanes>
FUSEPASS_INLINE void store(T* p, const VectorizedN<T, 1>& packed, Lanes n) { store_as(p, packed, n); }
// To int8_t towards zero, to an FP8 type to nearest.
template <typename T, typename Lanes>
FUSEPASS_INLINE void store(T* p, const Floats& a, Lanes n) {
  alignas(64) float all[kLanes];
  a.store(all);
  for (int i = 0; i < n.count; ++i) p[i] = static_cast<T>(all[i]);
}
FUSEPASS_INLINE void store(bool* p, const Floats& a, AllLanes) {
  to_bools(p, a[0]);
  to_bools(p + Vector::size(), a[1]);
}
FUSEPASS_INLINE void store(bool* p, const Floats& a, FirstLanes n) {
  bool all[kLanes];
  store(all, a, AllLanes{});
  std::memcpy(p, all, n.count);
}

}  // namespace
