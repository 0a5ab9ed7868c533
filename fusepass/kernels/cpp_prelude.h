// What every generated row kernel stands on besides its steps (`cpp_vectors.h`): rows in memory, loops, rows split over
// threads, sums over rows and columns, and the operations that C++ has no operator for.

namespace {

// Reductions start afresh every kBlock columns, so that rounding errors grow with kBlock / kLanes + cols / kBlock.
constexpr int64_t kBlock = 64 * kLanes;
// Column sums are kept in FP32 for this many rows, then added to FP64 totals.
constexpr int64_t kRowBlock = 16;

// ---- memory ----

// Brings the cache lines of one step of columns closer.
template <typename T>
FUSEPASS_INLINE void prefetch(const T* p) {
  for (size_t i = 0; i < kLanes * sizeof(T); i += 64) __builtin_prefetch(reinterpret_cast<const char*>(p) + i, 0);
}

// A row whose columns are `stride` apart, as a row of contiguous columns: in place, or copied into `scratch`.
template <typename T>
FUSEPASS_INLINE const T* contiguous_row(const T* p, int64_t stride, int64_t cols, T* scratch) {
  if (stride == 1) return p;
  for (int64_t c = 0; c < cols; ++c) scratch[c] = p[c * stride];
  return scratch;
}
template <typename T>
FUSEPASS_INLINE void scatter_row(T* p, int64_t stride, int64_t cols, const T* scratch) {
  if (stride == 1) return;
  for (int64_t c = 0; c < cols; ++c) p[c * stride] = scratch[c];
}

// Memory of one thread, cut into cache-line-aligned rows.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : memory_(static_cast<char*>(std::aligned_alloc(64, bytes + 64))), next_(memory_) {
    if (!memory_) throw std::bad_alloc();
  }
  ~Scratch() { std::free(memory_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  template <typename T>
  static constexpr int64_t row_bytes(int64_t cols) { return (cols * int64_t(sizeof(T)) + 63) / 64 * 64; }
  template <typename T>
  T* take(int64_t cols) {
    T* result = reinterpret_cast<T*>(next_);
    next_ += row_bytes<T>(cols);
    return result;
  }

 private:
  char* memory_;
  char* next_;
};

// ---- loops ----

// Two steps at a time, of turn 0 and of turn 1, for what would otherwise wait for the step before it.
template <typename Step>
FUSEPASS_INLINE void for_columns_by_turns(int64_t begin, int64_t end, const Step& step) {
  constexpr std::integral_constant<int, 0> kEven;
  constexpr std::integral_constant<int, 1> kOdd;
  int64_t c = begin;
  for (; c + 2 * kLanes <= end; c += 2 * kLanes) {
    step(c, AllLanes{}, kEven);
    step(c + kLanes, AllLanes{}, kOdd);
  }
  for (; c + kLanes <= end; c += kLanes) step(c, AllLanes{}, kEven);
  if (c < end) step(c, FirstLanes{static_cast<int>(end - c)}, kEven);
}
template <typename Step>
FUSEPASS_INLINE void for_columns(int64_t begin, int64_t end, const Step& step) {
  for_columns_by_turns(begin, end, [&](int64_t c, auto n, auto) __attribute__((always_inline)) { step(c, n); });
}

// Throws for the first position that is not below `bound`; `at(row)` is where the position of a row lies.
template <typename At>
void check_positions(const char* table, int64_t rows, int64_t bound, const At& at) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t position = *at(row);
    if (static_cast<uint64_t>(position) < static_cast<uint64_t>(bound)) continue;
    throw std::out_of_range(std::string("operand ") + table + ": position " + std::to_string(position) +
                            " is not in the range from 0 to " + std::to_string(bound - 1));
  }
}

// Runs `body(part, first row, last row + 1)` for each part of the rows, each in a thread of its own.
template <typename Body>
void parallel_rows(int64_t n_parts, int64_t rows, const Body& body) {
  if (n_parts == 1) return body(int64_t(0), int64_t(0), rows);
#pragma omp parallel for schedule(static, 1) num_threads(static_cast<int>(n_parts))
  for (int64_t part = 0; part < n_parts; ++part) body(part, rows * part / n_parts, rows * (part + 1) / n_parts);
}

inline int64_t parts_of(int64_t threads, int64_t rows, int64_t cols) {
  constexpr int64_t kGrain = 16384;  // elements: less work than this does not pay for waking a thread
  return std::max<int64_t>(1, std::min({threads, rows, rows * cols / kGrain}));
}

// ---- reductions ----

template <typename T>
struct Sum {
  static constexpr T identity() { return T(0); }
  template <typename V>
  static FUSEPASS_INLINE V combine(const V& a, const V& b) { return a + b; }
};
template <typename T>
struct Max {
  static constexpr T identity() { return -std::numeric_limits<T>::infinity(); }
  template <typename V>
  static FUSEPASS_INLINE V combine(const V& a, const V& b) { return at::vec::maximum(a, b); }
  static FUSEPASS_INLINE T combine(T a, T b) { return a != a || a > b ? a : b; }
};
template <typename T>
struct Min {
  static constexpr T identity() { return std::numeric_limits<T>::infinity(); }
  template <typename V>
  static FUSEPASS_INLINE V combine(const V& a, const V& b) { return at::vec::minimum(a, b); }
  static FUSEPASS_INLINE T combine(T a, T b) { return a != a || a < b ? a : b; }
};

// The lanes of one vector, combined: each half with the other, down to one.
template <typename Op>
FUSEPASS_INLINE double combine_lanes(Wide a) {
#if defined(CPU_CAPABILITY_AVX512)
  a = Op::combine(a, Wide(_mm512_shuffle_f64x2(a, a, 0x4e)));
  a = Op::combine(a, Wide(_mm512_permutex_pd(a, 0x4e)));
  a = Op::combine(a, Wide(_mm512_permute_pd(a, 0x55)));
  return _mm512_cvtsd_f64(a);
#else
  alignas(64) double lanes[Wide::size()];
  a.store(lanes);
  for (int n = Wide::size() / 2; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) lanes[i] = Op::combine(lanes[i], lanes[i + n]);
  }
  return lanes[0];
#endif
}

// A reduction of one row: two accumulators per lane within a block of columns, which take turns so that no step waits
// for the one before it; FP64 over lanes and blocks.
template <template <typename> class Op, typename Vector>
class RowReduction {
  using T = typename Vector::value_type;
  Vector block_[2] = {Vector(Op<T>::identity()), Vector(Op<T>::identity())};
  double total_ = Op<double>::identity();

 public:
  template <int turn>
  FUSEPASS_INLINE void add(const Vector& a, AllLanes, std::integral_constant<int, turn>) {
    block_[turn] = Op<T>::combine(block_[turn], a);
  }
  template <int turn>
  FUSEPASS_INLINE void add(const Vector& a, FirstLanes n, std::integral_constant<int, turn>) {
    block_[turn] = Op<T>::combine(block_[turn], Vector::set(Vector(Op<T>::identity()), a, n.count));
  }
  FUSEPASS_INLINE void end_block() {
    Doubles wide = to_doubles(Op<T>::combine(block_[0], block_[1]));
    for (int n = kVectors; n > 0; n /= 2) {
      for (int i = 0; i < n; ++i) wide[i] = Op<double>::combine(wide[i], wide[i + n]);
    }
    total_ = Op<double>::combine(total_, combine_lanes<Op<double>>(wide[0]));
    block_[0] = block_[1] = Vector(Op<T>::identity());
  }
  FUSEPASS_INLINE T value() const { return static_cast<T>(total_); }
};

// One column sum of one thread: partial sums of the last rows, and their totals.
template <typename Vector, typename Lanes>
FUSEPASS_INLINE void accumulate(typename Vector::value_type* partial, const Vector& a, Lanes n) {
  store(partial, load(partial, n) + a, n);
}
template <typename T>
void flush_partial(T* partial, double* totals, int64_t cols) {
  for_columns(0, cols, [&](int64_t c, auto n) {
    const auto sum = load(partial + c, n);
    store(totals + c, load(totals + c, n) + to_doubles(sum), n);
    store(partial + c, decltype(sum - sum)(0), n);
  });
}

// Adds up the totals of all parts, in their order, and rounds once: to FP32, and from there to T.
template <typename T>
void write_column_sum(
    T* out, int64_t stride, int64_t cols, int64_t n_parts, const double* totals, int64_t part_stride) {
  for_columns(0, cols, [&](int64_t c, auto n) {
    Doubles sum(0);
    for (int64_t part = 0; part < n_parts; ++part) sum = sum + load(totals + part * part_stride + c, n);
    alignas(64) T lanes[kLanes];
    T* row = stride == 1 ? out + c : lanes;
    if constexpr (std::is_same_v<T, double>) store(row, sum, n);
    else if constexpr (std::is_same_v<T, float>) store(row, to_floats(sum), n);
    else store(row, round_to<T>(to_floats(sum)), n);
    for (int i = 0; stride != 1 && i < n.count; ++i) out[(c + i) * stride] = lanes[i];
  });
}

// ---- operations that C++ has no operator for: each for a number and for a step of columns ----

template <typename V>
constexpr bool is_number = std::is_floating_point_v<V>;

#define FUSEPASS_UNARY(name, number, vector)          \
  template <typename V>                               \
  FUSEPASS_INLINE V name(const V& a) {                \
    if constexpr (is_number<V>) return number;        \
    else return vector;                               \
  }
FUSEPASS_UNARY(op_neg, -a, a.neg())
FUSEPASS_UNARY(op_abs, std::abs(a), a.abs())
FUSEPASS_UNARY(op_round, std::nearbyint(a), a.round())
FUSEPASS_UNARY(op_sqrt, std::sqrt(a), a.sqrt())
FUSEPASS_UNARY(op_reciprocal, V(1) / a, V(1) / a)
FUSEPASS_UNARY(op_rsqrt, V(1) / std::sqrt(a), V(1) / a.sqrt())
FUSEPASS_UNARY(op_exp, std::exp(a), a.exp())
FUSEPASS_UNARY(op_tanh, std::tanh(a), a.tanh())
FUSEPASS_UNARY(op_erf, std::erf(a), a.erf())
FUSEPASS_UNARY(op_sigmoid, V(1) / (V(1) + std::exp(-a)), V(1) / (V(1) + a.neg().exp()))
FUSEPASS_UNARY(op_relu, (a != a || a > V(0) ? a : V(0)), at::vec::maximum(a, V(0)))
#undef FUSEPASS_UNARY

template <typename V>
FUSEPASS_INLINE V op_fma(const V& a, const V& b, const V& c) {
  if constexpr (is_number<V>) return std::fma(a, b, c);
  else return at::vec::fmadd(a, b, c);
}
template <typename V>
FUSEPASS_INLINE V op_maximum(const V& a, const V& b) {
  if constexpr (is_number<V>) return a != a || a > b ? a : b;
  else return at::vec::maximum(a, b);
}
template <typename V>
FUSEPASS_INLINE V op_minimum(const V& a, const V& b) {
  if constexpr (is_number<V>) return a != a || a < b ? a : b;
  else return at::vec::minimum(a, b);
}

// Truth values are 1 and 0. No comparison with NaN is true but `!=`.
#define FUSEPASS_COMPARISON(name, number, vector)  \
  template <typename V>                            \
  FUSEPASS_INLINE V name(const V& a, const V& b) { \
    if constexpr (is_number<V>) return number;     \
    else return vector;                            \
  }
FUSEPASS_COMPARISON(op_lt, a < b, a.lt(b))
FUSEPASS_COMPARISON(op_le, a <= b, a.le(b))
FUSEPASS_COMPARISON(op_gt, a > b, a.gt(b))
FUSEPASS_COMPARISON(op_ge, a >= b, a.ge(b))
FUSEPASS_COMPARISON(op_eq, a == b, a.eq(b))
FUSEPASS_COMPARISON(op_ne, a != b, a.ne(b))
#undef FUSEPASS_COMPARISON

template <typename V>
FUSEPASS_INLINE V op_where(const V& condition, const V& a, const V& b) {
  if constexpr (is_number<V>) return condition != 0 ? a : b;
  else return V::blendv(b, a, condition != V(0));
}

}  // namespace
