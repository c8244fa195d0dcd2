// The operator dflash_server::linear: x @ weight.T + bias for few rows x [T, in] and a weight [out, in] in row order,
// in float32 or bfloat16. A product of few rows waits for the weight's memory, so each number is read once.
//
// Every sum over `in` is made in fp32 lanes in one order, whatever the other rows and threads. So a row's result
// does not depend on the batch. Products of more than `most_rows` rows go to PyTorch.
//
// Rows of x are packed in the order in which tiles read them. A tile has ROWS rows and OUTS outputs, whose sums stay in
// registers. Rows of x and of the weight are walked DEPTH_BYTES at a time, which the first cache holds for 16 rows.
//
// The operator dflash_server::linear_float32 leaves the sums of bfloat16 in float32. It computes any number of rows,
// because PyTorch would round them.

#include "vectors.h"

#include <vector>

using namespace dflash_server;

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int ROWS = 4, OUTS = 6;  // of 32 registers a tile has 24 for its sums
#else
constexpr int ROWS = 3, OUTS = 4;  // of 16 registers 12
#endif
constexpr int BLOCK_ROWS = 8 * ROWS;
constexpr int GROUP = 8;  // tiles whose sums are kept while the next numbers of x are in the first cache
constexpr int64_t DEPTH_BYTES = 2048;

// Return lanes of a where a lane's number lacks the bit HALF, and else of b, plus the lanes that are HALF away.
template <int HALF, int... I>
inline Lanes folded(Lanes a, Lanes b, std::integer_sequence<int, I...>) {
  const Bits own = {uint32_t(I & HALF ? LANES + I : I)...}, other = own ^ HALF;
  return __builtin_shuffle(a, b, own) + __builtin_shuffle(a, b, other);
}

// Return the lanes of totals in the order of their vectors: the first halving has put odd ones half the lanes away.
template <int... I>
inline Lanes in_order(Lanes totals, std::integer_sequence<int, I...>) {
  constexpr auto reversed = [](int i) {
    int found = 0;
    for (int bit = 1, mirror = LANES / 2; mirror; bit *= 2, mirror /= 2) found |= i & bit ? mirror : 0;
    return uint32_t(found);
  };
  return __builtin_shuffle(totals, Bits{reversed(I)...});
}

// Leave the totals of N vectors in the first N lanes. Every total is the same sum of pairs, whatever N is.
template <int N, int HALF = LANES / 2>
UNROLLED inline void total(Lanes* sums) {
  constexpr int HALVED = (N + 1) / 2;
  constexpr auto lanes = std::make_integer_sequence<int, LANES>();
  each<HALVED>([&](auto i) UNROLLED { sums[i] = folded<HALF>(sums[2 * i], sums[std::min(2 * i + 1, N - 1)], lanes); });
  if constexpr (HALF > 1)
    total<HALVED, HALF / 2>(sums);
  else
    each<HALVED>([&](auto i) UNROLLED { sums[i] = in_order(sums[i], lanes); });
}

// Rows of a weight that a tile asks the memory for, line by line, because the next tile reads them.
struct Ahead {
  const char* from;
  int64_t rows;
};

// Where a tile's totals go: rows of y are `out` numbers apart. `added` has the bias of each of a tile's totals.
template <class Written>
struct Place {
  Written* y;
  int64_t out;
  const float* added;
};

// Add the products of R packed rows of x with O rows of a weight, `stride` bytes apart, over `steps` steps. The sums
// begin with zero or with `sums`, and end there or in a place.
template <class Kind, class Result, int R, int O>
void add_tile(Lanes* sums, bool is_first, const Lanes* x, const char* weight, int64_t stride, int64_t steps,
              Ahead ahead, const Place<typename Result::Number>* place) {
  Lanes own[R * O];
  if (is_first)
    each<R * O>([&](auto i) UNROLLED { own[i] = Lanes{}; });
  else
    each<R * O>([&](auto i) UNROLLED { own[i] = sums[i]; });
  for (int64_t k = 0, left = steps; k < steps; k++, weight += WIDTH) {
    for (int64_t i = 0; i < ahead.rows; i++, ahead.from += WIDTH) {
      __builtin_prefetch(ahead.from);
      if (--left) continue;
      left = steps;
      ahead.from += stride - steps * WIDTH;
    }
    each<Kind::PARTS>([&](auto part) UNROLLED {
      Lanes right[R];
      each<R>([&](auto r) UNROLLED { right[r] = x[part * R + r]; });
      each<O>([&](auto o) UNROLLED {
        Lanes left = Kind::part(*reinterpret_cast<const Bits*>(weight + o * stride), part);
#if defined(__AVX512F__)
        asm("" : "+v"(left));  // or GCC loads it once for each row
#endif
        each<R>([&](auto r) UNROLLED { own[r * O + o] = Kind::add(left, right[r], own[r * O + o]); });
      });
    });
    x += Kind::PARTS * R;
  }
  if (!place) {
    each<R * O>([&](auto i) UNROLLED { sums[i] = own[i]; });
    return;
  }
  constexpr int VECTORS = (R * O + LANES - 1) / LANES;
  typename Result::Number flat[VECTORS * LANES];
  total<R * O>(own);
  each<VECTORS>([&](auto i) UNROLLED {
    Result::store(own[i] + reinterpret_cast<const Lanes*>(place->added)[i], flat + i * LANES);
  });
  for (int r = 0; r < R; r++) std::memcpy(place->y + r * place->out, flat + r * O, O * sizeof flat[0]);
}

// Sums of a thread's group of tiles.
Lanes* sums_of_tile(int64_t tile) {
  alignas(64) static thread_local Lanes sums[GROUP][BLOCK_ROWS * OUTS];
  return sums[tile];
}

// A product as the threads share it. x is packed: ROWS rows at a time, or fewer last, side by side for each step.
template <class Kind, class Result>
struct Product {
  using Number = typename Kind::Number;
  using Written = typename Result::Number;
  const Lanes* x;
  int64_t rows, in, out;
  const Number *weight, *bias;
  Written* y;
  const int64_t whole = in / Kind::STEP, steps = (in + Kind::STEP - 1) / Kind::STEP;

  // Call one(R, first) for R rows of x at a time.
  template <class One>
  static void tiles_of_rows(int64_t rows, const One& one) {
    for (int64_t r = 0; r < rows; r += ROWS) {
      const int64_t left = rows - r;
      if (left >= ROWS) one(std::integral_constant<int, ROWS>(), r);
      else if (left == 1) one(std::integral_constant<int, 1>(), r);
      else if (left == 2) one(std::integral_constant<int, 2>(), r);
      else one(std::integral_constant<int, ROWS - 1>(), r);
    }
  }

  // Add steps from k on of `count` rows of x from `start` on to a tile's sums. After the last they go to y.
  template <int O>
  void add(int64_t at, int64_t tile, int64_t start, int64_t count, int64_t k, const Number* from, int64_t stride,
           int64_t length, const Number* next) const {
    alignas(WIDTH) float added[(ROWS * O + LANES - 1) / LANES * LANES] = {};
    Place<Written> place = {y + start * out + at, out, added};
    const bool is_last = k + length == steps || k == whole;
    for (int i = 0; is_last && bias && i < ROWS * O; i++) {
      Number number;  // a mapped file may have it at any place
      std::memcpy(&number, bias + at + i % O, sizeof number);
      added[i] = Kind::wide(number);
    }
    int64_t asked = 0, row = 0;
    tiles_of_rows(count, [&](auto tile_rows, int64_t r) {
      constexpr int R = tile_rows;
      row = std::min(r + R, count) * O / count;
      const Ahead ahead = {reinterpret_cast<const char*>(next) + asked * stride, next ? row - asked : 0};
      asked = row;
      add_tile<Kind, Result, R, O>(sums_of_tile(tile) + r * O, k == 0, x + ((start + r) * steps + k * R) * Kind::PARTS,
                                   reinterpret_cast<const char*>(from), stride, length, ahead,
                                   is_last ? &place : nullptr);
      place.y += R * out;
    });
  }

  // Write `tiles` tiles of O outputs each. `next` are the rows of the weight that are read then.
  template <int O>
  void outputs(int64_t at, int64_t tiles, const Number* next) const {
    const int64_t stride = in * int64_t(sizeof(Number));
    for (int64_t start = 0; start < rows; start += BLOCK_ROWS) {
      const int64_t count = std::min<int64_t>(BLOCK_ROWS, rows - start);
      const int64_t depth = count > ROWS ? std::min(steps, DEPTH_BYTES / WIDTH) : steps;
      for (int64_t k = 0; k < steps; k += depth)
        for (int64_t tile = 0; tile < tiles; tile++) {
          const int64_t own = at + tile * O, length = std::min(depth, whole - k);
          const Number* from = weight + own * in + k * Kind::STEP;
          const bool is_last = k + depth >= steps;
          const Number* then = is_last ? next : weight + at * in + (k + depth) * Kind::STEP;
          if (start) then = nullptr;  // all are in a cache
          else if (tile + 1 < tiles) then = from + O * in;
          if (length > 0) add<O>(own, tile, start, count, k, from, stride, length, then);
          if (!is_last || whole == steps) continue;
          const int64_t after = whole * Kind::STEP;
          Number rest[O][Kind::STEP] = {};
          for (int o = 0; o < O; o++) std::memcpy(rest[o], weight + (own + o) * in + after, (in - after) * sizeof(Number));
          add<O>(own, tile, start, count, whole, rest[0], WIDTH, 1, nullptr);
        }
    }
  }

  void run() const {
    const int64_t threads = threads_for(rows * in * out);
    const int64_t tiles = out / OUTS, group = std::clamp<int64_t>(tiles / (8 * threads), 1, GROUP);
    const int64_t groups = (tiles + group - 1) / group, parts = groups + (tiles * OUTS < out);
    auto run_part = [&](int64_t part, int64_t next) {
      const Number* then = weight + std::min(next * group, tiles) * OUTS * in;
      if (part < groups) outputs<OUTS>(part * group * OUTS, std::min(group, tiles - part * group), then);
      else outputs<1>(tiles * OUTS, out - tiles * OUTS, then);
    };
    std::atomic<int64_t> next = 0;  // a thread that another process slows down takes fewer parts
    auto work = [&] {
      for (int64_t part = next++; part < parts;) {
        const int64_t then = next++;
        run_part(part, then);
        part = then;
      }
    };
    threads == 1 ? work() : helpers().share(threads - 1, work);
  }
};

template <class Kind, class Result = Kind>
void multiply(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, Tensor& y) {
  using Number = typename Kind::Number;
  const int64_t rows = x.size(0), in = x.size(1), steps = (in + Kind::STEP - 1) / Kind::STEP;
  Lanes* packed = scratch(rows * steps * Kind::PARTS);
  const Number* numbers = static_cast<const Number*>(x.data_ptr());
  Product<Kind, Result>::tiles_of_rows(rows, [&](auto tile_rows, int64_t first) {
    constexpr int R = tile_rows;
    for (int64_t r = first; r < first + R; r++)
      for (int64_t k = 0; k < steps; k++) {
        Bits read = {};
        const int64_t left = in - k * Kind::STEP;
        std::memcpy(&read, numbers + r * in + k * Kind::STEP, std::min<int64_t>(left, Kind::STEP) * sizeof(Number));
        for (int part = 0; part < Kind::PARTS; part++)
          packed[first * steps * Kind::PARTS + (k * Kind::PARTS + part) * R + r - first] = Kind::part(read, part);
      }
  });
  const void* added = bias.has_value() ? bias->data_ptr() : nullptr;
  Product<Kind, Result>{packed, rows, in, weight.size(0), static_cast<const Number*>(weight.data_ptr()),
                        static_cast<const Number*>(added), static_cast<typename Result::Number*>(y.data_ptr())}
      .run();
}

// Rows up to which products with weights of one shape run here, where they were timed.
struct Limit {
  int64_t out, in;
  bool is_float32;
  int64_t most_rows;
};

std::vector<Limit> limits;
constexpr int64_t MOST_ROWS = 32;

int64_t most_rows(int64_t out, int64_t in, bool is_float32) {
  for (const Limit& limit : limits)
    if (limit.out == out && limit.in == in && limit.is_float32 == is_float32) return limit.most_rows;
  return MOST_ROWS;
}

// Return true for tensors of one dtype of `linear`, in row order, whose sizes fit.
bool is_own(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const ScalarType type = x.scalar_type();
  auto fits = [type](const Tensor& tensor) { return tensor.scalar_type() == type && tensor.is_contiguous(); };
  const bool is_ours = type == ScalarType::Float || type == ScalarType::BFloat16;
  return is_ours && fits(x) && fits(weight) && (!bias.has_value() || fits(*bias)) && x.dim() == 2 && weight.dim() == 2 &&
         x.size(1) == weight.size(1) && x.size(1) > 0;
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const bool is_float32 = x.scalar_type() == ScalarType::Float;
  if (!is_own(x, weight, bias) || x.size(0) > most_rows(weight.size(0), weight.size(1), is_float32)) {
    StableIValue stack[] = {torch::stable::detail::from(x), torch::stable::detail::from(weight),
                            torch::stable::detail::from(bias)};
    TORCH_ERROR_CODE_CHECK(aoti_torch_call_dispatcher("aten::linear", "", stack));
    return torch::stable::detail::to<Tensor>(stack[0]);
  }
  Tensor y = torch::stable::new_empty(x, {x.size(0), weight.size(0)});
  is_float32 ? multiply<Float32>(x, weight, bias, y) : multiply<BFloat16>(x, weight, bias, y);
  return y;
}

Tensor linear_float32(const Tensor& x, const Tensor& weight) {
  STD_TORCH_CHECK(is_own(x, weight, {}) && x.scalar_type() == ScalarType::BFloat16,
                  "linear_float32 takes contiguous x [T, in] and weight [out, in] in bfloat16");
  Tensor y = torch::stable::new_empty(x, {x.size(0), weight.size(0)}, ScalarType::Float);
  multiply<BFloat16, Float32>(x, weight, {}, y);
  return y;
}

void set_most_rows(int64_t out, int64_t in, bool is_float32, int64_t rows) {
  std::erase_if(limits, [&](const Limit& old) { return old.out == out && old.in == in && old.is_float32 == is_float32; });
  limits.push_back({out, in, is_float32, rows});
}

void set_threads(int64_t threads) { own_threads = threads; }

}  // namespace

STABLE_TORCH_LIBRARY(dflash_server, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def("linear_float32(Tensor x, Tensor weight) -> Tensor");
  library.def("set_most_rows(int out_features, int in_features, bool is_float32, int rows) -> ()");
  library.def("set_threads(int threads) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(dflash_server, CPU, library) {
  library.impl("linear", TORCH_BOX(&linear));
  library.impl("linear_float32", TORCH_BOX(&linear_float32));
}

STABLE_TORCH_LIBRARY_IMPL(dflash_server, CompositeExplicitAutograd, library) {
  library.impl("set_most_rows", TORCH_BOX(&set_most_rows));
  library.impl("set_threads", TORCH_BOX(&set_threads));
}
