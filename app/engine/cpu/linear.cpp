// The operator linear: x @ weight.T + bias for few rows x [T, in] and a weight [out, in] in row order,
// in the library's dtype, whose numbers are read once. Every sum over `in` is made in fp32 lanes in one order, whatever
// the other rows and threads. So a row's result does not depend on the batch. More than `most_rows` rows go to PyTorch.
//
// Rows of x are packed in the order in which tiles read them. A tile has ROWS rows and OUTS outputs, whose sums stay in
// registers. Rows of x and of the weight are walked in equal pieces, whose DEPTH_BYTES fast caches hold for 16 rows.
// Few rows walk the weight in the order of its addresses, because they are as fast as the memory.
//
// The operator linear_float32 leaves the sums in float32. It computes any number of rows,
// because PyTorch would round them to bfloat16.

#include "vectors.h"
#include "work.h"

using namespace OPERATORS;

namespace {

constexpr int GROUP = 8;  // tiles whose sums are kept while the next numbers of x are in the first cache
constexpr int64_t DEPTH_BYTES = 2560;
constexpr int64_t AHEAD_BYTES = 4096;  // what few rows ask the memory for before it is multiplied
constexpr int64_t FEW_ROWS = WIDTH == 64 ? 2 * ROWS : 2, FEW_BYTES = 24 << 10;  // that fit in the first cache

// Rows of a weight that a tile asks the memory for, line by line, because the next tile reads them.
struct Ahead {
  const char* from;
  int64_t rows;
};

// Where a tile's totals go: rows are `stride` numbers apart. `added` has the bias of each of a tile's totals. Numbers of
// `plus` are added to the rounded totals, and the results go to `also`, too.
template <class Written>
struct Place {
  Written* y;
  int64_t stride;
  const float* added;
  const Written* plus = nullptr;
  Written* also = nullptr;
  int64_t also_stride = 0;
};

// Add the products of R packed rows of x with O rows of a weight, `stride` bytes apart, over `steps` steps. The sums
// begin with zero or with `sums`, and end there or in a place. WALKS: it reads one row of the weight after another.
template <class Result, int R, int O, bool WALKS>
void add_tile(Lanes* sums, bool is_first, const Lanes* x, const char* weight, int64_t stride, int64_t steps,
              Ahead ahead, const Place<typename Result::Number>* place) {
  Lanes own[R * O];
  if (is_first)
    each<R * O>([&](auto i) UNROLLED { own[i] = Lanes{}; });
  else
    each<R * O>([&](auto i) UNROLLED { own[i] = sums[i]; });
  if constexpr (WALKS) {
    // One stream is read faster than O of them, and processors begin the next sums while these wait.
    for (int o = 0; o < O; o++, weight += stride) {
      Lanes walked[R];
      each<R>([&](auto r) UNROLLED { walked[r] = own[r * O + o]; });
      const Lanes* right = x;
      for (int64_t k = 0; k < steps; k++, right += Own::PARTS * R) {
        __builtin_prefetch(weight + k * WIDTH + AHEAD_BYTES);
        each<Own::PARTS>([&](auto part) UNROLLED {
          Lanes left = Own::part_at(weight + k * WIDTH, part);
          in_register(left);
          each<R>([&](auto r) UNROLLED { walked[r] = Own::add(left, right[part * R + r], walked[r]); });
        });
      }
      each<R>([&](auto r) UNROLLED { own[r * O + o] = walked[r]; });
    }
  } else {
    for (int64_t k = 0; k < steps; k++, weight += WIDTH) {
      for (int64_t i = 0; i < ahead.rows; i++) __builtin_prefetch(ahead.from + i * stride + k * WIDTH);
      each<Own::PARTS>([&](auto part) UNROLLED {
        Lanes right[R];
        each<R>([&](auto r) UNROLLED { in_register(right[r] = x[part * R + r]); });
        each<O>([&](auto o) UNROLLED {
          Lanes left = Own::part_at(weight + o * stride, part);
          in_register(left);
          each<R>([&](auto r) UNROLLED { own[r * O + o] = Own::add(left, right[r], own[r * O + o]); });
        });
      });
      x += Own::PARTS * R;
    }
  }
  if (!place) {
    each<R * O>([&](auto i) UNROLLED { sums[i] = own[i]; });
    return;
  }
  constexpr int VECTORS = (R * O + LANES - 1) / LANES;
  typename Result::Number flat[VECTORS * LANES];
  total<R * O>(own);
  if (place->added) each<VECTORS>([&](auto i) UNROLLED { own[i] += reinterpret_cast<const Lanes*>(place->added)[i]; });
  each<VECTORS>([&](auto i) UNROLLED { Result::store(own[i], flat + i * LANES); });
  for (int i = 0; place->plus && i < R * O; i++)
    flat[i] = Result::narrow(Result::wide(flat[i]) + Result::wide(place->plus[i / O * place->stride + i % O]));
  for (int r = 0; r < R; r++) {
    std::memcpy(place->y + r * place->stride, flat + r * O, O * sizeof flat[0]);
    if (place->also) std::memcpy(place->also + r * place->also_stride, flat + r * O, O * sizeof flat[0]);
  }
}

// Sums of a thread's group of tiles.
Lanes* sums_of_tile(int64_t tile) {
  alignas(64) static thread_local Lanes sums[GROUP][BLOCK_ROWS * OUTS];
  return sums[tile];
}

}  // namespace

namespace OPERATORS {

void read_row(const Rows& rows, int64_t i, void* y) {
  auto* to = static_cast<Own::Number*>(y);
  const Own::Number* from = static_cast<const Own::Number*>(rows.x) + i * rows.stride;
  if (!rows.norm && !rows.gated) {
    std::memcpy(to, from, rows.size * sizeof *to);
    return;
  }
  const int64_t vectors = (rows.size + LANES - 1) / LANES;
  struct Wide;
  Lanes *wide = scratch<Wide>(2 * vectors), *up = wide + vectors;
  widen(from, rows.size, wide);
  if (rows.gated) {
    widen(from + rows.size, rows.size, up);
    for (int64_t k = 0; k < vectors; k++) {
      const Lanes x = wide[k], power = exp2((x > 0 ? -x : x) * 1.44269504f);
      wide[k] = x * up[k] * (x > 0 ? Lanes{} + 1 : power) / (power + 1);
    }
  }
  if (rows.norm) {
    const float factor = rms_factor(wide, rows.size, rows.eps);
    float* numbers = reinterpret_cast<float*>(wide);
    for (int64_t k = 0; k < rows.size; k++) {
      numbers[k] *= factor * rows.norm[k];
      if (rows.finite && !std::isfinite(numbers[k])) numbers[k] = 0;
    }
  }
  narrow(wide, rows.size, to);
}

}  // namespace OPERATORS

namespace {

// A product as the threads share it. Each packs the rows for itself: ROWS rows at a time, or fewer last, side by side
// for each step.
template <class Result>
struct ProductWork : Work {
  using Number = Own::Number;
  using Written = typename Result::Number;
  const Product of;
  const int64_t in = of.rows.size, out = of.out, whole = in / Own::STEP, steps = (in + Own::STEP - 1) / Own::STEP;
  const int64_t tiles = out / OUTS, group, groups = (tiles + group - 1) / group;
  const bool is_few = of.rows.count == 1 || (of.rows.count <= FEW_ROWS && of.rows.count * steps * WIDTH <= FEW_BYTES);
  const Number* weight = static_cast<const Number*>(of.weight);
  const Own::Number* bias = static_cast<const Own::Number*>(of.bias);

  ProductWork(const Product& of, int64_t threads)
      : Work(num_parts(of.out, threads)), of(of), group(size_of_group(of.out, threads)) {}

  static int64_t size_of_group(int64_t out, int64_t threads) {
    return std::clamp<int64_t>(out / OUTS / (8 * threads), 1, GROUP);
  }

  static int64_t num_parts(int64_t out, int64_t threads) {
    const int64_t tiles = out / OUTS, group = size_of_group(out, threads);
    return (tiles + group - 1) / group + (tiles * OUTS < out);
  }

  const Lanes* packed() const {
    struct Packed;
    static thread_local uint64_t owner = 0;
    Lanes* to = scratch<Packed>((of.rows.count + 1) * steps * Own::PARTS);
    if (std::exchange(owner, serial) == serial) return to;
    Bits* row = reinterpret_cast<Bits*>(to + of.rows.count * steps * Own::PARTS);
    Own::Number* numbers = reinterpret_cast<Own::Number*>(row);
    std::fill(numbers + whole * Own::STEP, numbers + steps * Own::STEP, 0);
    tiles_of_rows(of.rows.count, [&](auto tile_rows, int64_t first) {
      constexpr int R = tile_rows;
      for (int64_t r = 0; r < R; r++) {
        read_row(of.rows, first + r, numbers);
        for (int64_t k = 0; k < steps; k++)
          for (int part = 0; part < Own::PARTS; part++)
            to[first * steps * Own::PARTS + (k * Own::PARTS + part) * R + r] = Own::part(row[k], part);
      }
    });
    return to;
  }

  // Add steps from k on of `count` rows of x from `start` on to the sums of the tile at output `at`. After the last
  // they go to a place.
  template <int O>
  void add(const Lanes* x, int64_t at, Place<Written> place, int64_t tile, int64_t start, int64_t count, int64_t k,
           const Number* from, int64_t stride, int64_t length, const Number* next) const {
    alignas(WIDTH) float added[(ROWS * O + LANES - 1) / LANES * LANES];
    const bool is_last = k + length == steps || k == whole;
    place.added = is_last && bias ? added : nullptr;
    for (int i = 0; place.added && i < ROWS * O; i++) {
      Own::Number number;  // a mapped file may have it at any place
      std::memcpy(&number, bias + at + i % O, sizeof number);
      added[i] = Own::wide(number);
    }
    int asked = 0, row = 0;
    tiles_of_rows(count, [&](auto tile_rows, int64_t r) {
      constexpr int R = tile_rows;
      row = int(r + R) * O / int(count);
      const Ahead ahead = {reinterpret_cast<const char*>(next) + asked * stride, next ? row - asked : 0};
      asked = row;
      const bool walks = R == 1 || (is_few && r == 0);  // tiles of more rows find the weight in a cache
      const auto add = walks ? add_tile<Result, R, O, true> : add_tile<Result, R, O, R == 1>;
      add(sums_of_tile(tile) + r * O, k == 0, x + ((start + r) * steps + k * R) * Own::PARTS,
          reinterpret_cast<const char*>(from), stride, length, ahead, is_last ? &place : nullptr);
      place.y += R * place.stride;
      if (place.plus) place.plus += R * place.stride;
      if (place.also) place.also += R * place.also_stride;
    });
  }

  // Write `count` tiles of O outputs each from output `at` on, to `to`. `next` are the rows of the weight that are read
  // then.
  template <int O>
  void outputs(const Lanes* x, int64_t at, int64_t count, const Place<Written>& to, const Number* next) const {
    const int64_t stride = in * int64_t(sizeof(Number));
    for (int64_t start = 0; start < of.rows.count; start += BLOCK_ROWS) {
      const int64_t rows = std::min<int64_t>(BLOCK_ROWS, of.rows.count - start);
      const int64_t most = DEPTH_BYTES / WIDTH, pieces = rows > ROWS && !is_few ? (steps + most - 1) / most : 1;
      const int64_t depth = (steps + pieces - 1) / pieces;
      for (int64_t k = 0; k < steps; k += depth)
        for (int64_t tile = 0; tile < count; tile++) {
          const int64_t own = at + tile * O, length = std::min(depth, whole - k);
          Place<Written> place = to;
          place.y += start * to.stride + tile * O;
          if (to.plus) place.plus += start * to.stride + tile * O;
          if (to.also) place.also += start * to.also_stride + tile * O;
          const Number* from = weight + own * in + k * Own::STEP;
          const bool is_last = k + depth >= steps;
          const Number* then = is_last ? next : weight + at * in + (k + depth) * Own::STEP;
          if (start || is_few) then = nullptr;  // all are in a cache, or walked
          else if (tile + 1 < count) then = from + O * in;
          if (length > 0) add<O>(x, own, place, tile, start, rows, k, from, stride, length, then);
          if (!is_last || whole == steps) continue;
          const int64_t after = whole * Own::STEP;
          Number rest[O][Own::STEP] = {};
          for (int o = 0; o < O; o++) std::memcpy(rest[o], weight + (own + o) * in + after, (in - after) * sizeof(Number));
          add<O>(x, own, place, tile, start, rows, whole, rest[0], WIDTH, 1, nullptr);
        }
    }
  }

  int64_t first_of(int64_t part) const { return std::min(part * group, tiles) * OUTS; }
  int64_t end_of(int64_t part) const { return part < groups ? first_of(part + 1) : out; }

  void run_to(int64_t part, const Place<Written>& to) const {
    const int64_t at = first_of(part);
    const Number* next = part + 1 < parts ? weight + first_of(part + 1) * in : nullptr;
    if (part == groups) return outputs<1>(packed(), at, out - at, to, next);
    outputs<OUTS>(packed(), at, (end_of(part) - at) / OUTS, to, next);
  }

  void run(int64_t part) const override {
    const int64_t at = first_of(part);
    auto from_at = [&](const void* rows) { return rows ? static_cast<const Written*>(rows) + at : nullptr; };
    run_to(part, {static_cast<Written*>(of.y) + at, out, nullptr, from_at(of.plus),
                  const_cast<Written*>(from_at(of.also)), of.also_stride});
  }
};

// The largest output of a row, and the first of those that have it.
struct Best {
  float value;
  int64_t index;

  // NaN is larger than every number.
  bool is_below(const Best& other) const { return value == value && !(other.value <= value); }
};

// A product whose outputs are compared, and not kept: `best` [parts, rows].
struct BestWork : ProductWork<Float32> {
  using Base = ProductWork<Float32>;
  std::vector<Best>& best;

  BestWork(const Product& of, int64_t threads, std::vector<Best>& best) : Base(of, threads), best(best) {
    best.resize(this->parts * of.rows.count);
  }

  void run(int64_t part) const override {
    struct Outputs;
    constexpr int64_t WIDE = GROUP * OUTS;
    const int64_t first = this->first_of(part), count = this->end_of(part) - first, rows = this->of.rows.count;
    const float* found = reinterpret_cast<float*>(scratch<Outputs>((rows * WIDE + LANES - 1) / LANES));
    this->run_to(part, {const_cast<float*>(found), WIDE, nullptr});
    for (int64_t row = 0; row < rows; row++, found += WIDE) {
      Best own = {found[0], first};
      for (int64_t i = 1; i < count; i++)
        if (const Best other = {found[i], first + i}; own.is_below(other)) own = other;
      best[part * rows + row] = own;
    }
  }
};

// Multiply x by a weight, and write sums as Result.
template <class Result = Own>
void multiply(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, Tensor& y) {
  const Rows rows = {x.data_ptr(), x.size(0), x.size(1), x.size(1)};
  const int64_t out = weight.size(0), threads = threads_for(rows.count * rows.size * out);
  const void* added = bias.has_value() ? bias->data_ptr() : nullptr;
  const Product product = {rows, out, weight.data_ptr(), added, y.data_ptr()};
  Works works;
  works.push_back(std::make_unique<ProductWork<Result>>(product, threads));
  team().run(works, threads);
}

int64_t own_threads = 0;  // or 0 for as many as PyTorch has
int64_t most_rows = 32;   // of a product that runs here

// Return true for tensors of the library's dtype, in row order, whose sizes fit.
bool is_own(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  auto fits = [](const Tensor& tensor) { return tensor.scalar_type() == Own::TYPE && tensor.is_contiguous(); };
  return fits(x) && fits(weight) && (!bias.has_value() || fits(*bias)) && x.dim() == 2 && weight.dim() == 2 &&
         x.size(1) == weight.size(1) && x.size(1) > 0;
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  if (!is_own(x, weight, bias) || x.size(0) > most_rows) {
    StableIValue stack[] = {torch::stable::detail::from(x), torch::stable::detail::from(weight),
                            torch::stable::detail::from(bias)};
    TORCH_ERROR_CODE_CHECK(aoti_torch_call_dispatcher("aten::linear", "", stack));
    return torch::stable::detail::to<Tensor>(stack[0]);
  }
  Tensor y = torch::stable::new_empty(x, {x.size(0), weight.size(0)});
  multiply(x, weight, bias, y);
  return y;
}

Tensor linear_float32(const Tensor& x, const Tensor& weight) {
  STD_TORCH_CHECK(is_own(x, weight, {}), "linear_float32 takes contiguous x [T, in] and weight [out, in] of its dtype");
  Tensor y = torch::stable::new_empty(x, {x.size(0), weight.size(0)}, ScalarType::Float);
  multiply<Float32>(x, weight, {}, y);
  return y;
}

// Write the first of the largest outputs of x @ weight.T in fp32, or -1 where the largest is not finite.
void best_of(const Tensor& x, const Tensor& weight, Tensor choices) {
  STD_TORCH_CHECK(is_own(x, weight, {}), "best_of takes contiguous x [T, in] and weight [out, in] of one dtype");
  const int64_t rows = x.size(0), in = x.size(1), out = weight.size(0), threads = threads_for(rows * in * out);
  std::vector<Best> best;
  Works works;
  const Product product = {{x.data_ptr(), rows, in, in}, out, weight.data_ptr()};
  works.push_back(std::make_unique<BestWork>(product, threads, best));
  team().run(works, threads);
  for (int64_t row = 0; row < rows; row++) {
    Best most = best[row];
    for (size_t i = row; i < best.size(); i += rows)
      if (most.is_below(best[i])) most = best[i];
    static_cast<int64_t*>(choices.data_ptr())[row] = std::isfinite(most.value) ? most.index : -1;
  }
}

void set_threads(int64_t threads) { own_threads = threads; }
void set_most_rows(int64_t rows) { most_rows = rows; }
void set_heartbeat(const Tensor& count) {
  static Tensor kept = count;
  kept = count;
  heartbeat = static_cast<int64_t*>(kept.data_ptr());
}

}  // namespace

namespace OPERATORS {

int64_t threads_for(int64_t multiplications) {
  constexpr int64_t SMALL = 1 << 18;
  return multiplications < SMALL ? 1 : own_threads ? own_threads : torch::stable::get_num_threads();
}

void add_product(Works& works, const Product& of, int64_t threads) {
  if (of.scales) return add_int8_product(works, of, threads);
  works.push_back(std::make_unique<ProductWork<Own>>(of, threads));
}

void add_rows(Works& works, const Rows& rows, void* y) {
  auto* to = static_cast<Own::Number*>(y);
  auto one = [rows, to](int64_t row) { read_row(rows, row, to + row * rows.size); };
  works.push_back(std::make_unique<Function>(rows.count, one));
}

}  // namespace OPERATORS

STABLE_TORCH_LIBRARY_FRAGMENT(OPERATORS, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def("linear_float32(Tensor x, Tensor weight) -> Tensor");
  library.def("best_of(Tensor x, Tensor weight, Tensor(a!) choices) -> ()");
  library.def("set_most_rows(int rows) -> ()");
  library.def("set_threads(int threads) -> ()");
  library.def("set_heartbeat(Tensor(a!) count) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(OPERATORS, CPU, library) {
  library.impl("linear", TORCH_BOX(&linear));
  library.impl("linear_float32", TORCH_BOX(&linear_float32));
  library.impl("best_of", TORCH_BOX(&best_of));
  library.impl("set_heartbeat", TORCH_BOX(&set_heartbeat));
}

STABLE_TORCH_LIBRARY_IMPL(OPERATORS, CompositeExplicitAutograd, library) {
  library.impl("set_most_rows", TORCH_BOX(&set_most_rows));
  library.impl("set_threads", TORCH_BOX(&set_threads));
}
