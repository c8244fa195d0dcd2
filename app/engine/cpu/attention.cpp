// The operator attention: softmax(q k^T / sqrt(D)) v over paged K and V in the library's dtype.
//
// K and V are read where they lie, by the page table. All rows of a sequence, up to MOST_ROWS, and all query heads of a
// KV head share one reading.
//
// A row's tokens are walked in pieces and chunks of fixed places, and every sum is made in fp32 in one order. Tokens
// that a row does not see add zeros. So a row's result depends only on its own sequence: not on other rows, on
// the threads or on the pages.

#include <limits>

#include "vectors.h"
#include "work.h"

using namespace OPERATORS;

namespace {

constexpr int64_t PIECE = 128;   // tokens whose scores are kept, and whose K the first two caches hold
constexpr int64_t CHUNK = 1024;  // tokens that a thread takes where sequences are few
constexpr int64_t MOST_ROWS = 64;  // rows times query heads of a KV head that go together
constexpr int SHARED = 4;          // of them share a load of V
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int SUMS = 16;  // of 32 registers
#else
constexpr int SUMS = 8;
#endif
#define ALONE __attribute__((noinline))  // or GCC keeps the numbers of other loops in registers
constexpr float LEAST = std::numeric_limits<float>::lowest();

inline Bits broadcast(const void* word) {
  uint32_t bits;
  std::memcpy(&bits, word, sizeof bits);
  return Bits{} + bits;
}

inline Lanes broadcast(float x) { return reinterpret_cast<Lanes>(broadcast(&x)); }

inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

// Call one(R, first) for SHARED rows at a time, and for fewer last.
template <class One>
void rows_at_a_time(int64_t rows, const One& one) {
  int64_t r = 0;
  for (; r + SHARED <= rows; r += SHARED) one(std::integral_constant<int, SHARED>(), r);
  if (r + 2 <= rows) one(std::integral_constant<int, 2>(), r), r += 2;
  if (r < rows) one(std::integral_constant<int, 1>(), r);
}

// Call one(N, first) for MOST at a time of `count`, and then for one at a time.
template <int MOST, class One>
void most_at_a_time(int64_t count, const One& one) {
  int64_t i = 0;
  for (; i + MOST <= count; i += MOST) one(std::integral_constant<int, MOST>(), i);
  for (; i < count; i++) one(std::integral_constant<int, 1>(), i);
}

// Softmax's sums of some rows: the largest score, the total of shares relative to it, and the values by shares.
struct State {
  float *most, *total;
  Lanes* values;
};

// Rows of one sequence that go together, and the tokens that at least one of them sees.
struct Block {
  int64_t seq, first, rows, start, end;
};

struct Attention : AttentionRows {
  using Number = Own::Number;
  static constexpr int HALVES = 4 / sizeof(Number);  // vectors of fp32 that one of numbers becomes

  explicit Attention(const AttentionRows& rows) : AttentionRows(rows) {}

  const Number *q = static_cast<const Number*>(AttentionRows::q), *k = static_cast<const Number*>(AttentionRows::k);
  const Number* v = static_cast<const Number*>(AttentionRows::v);
  Number* y = static_cast<Number*>(AttentionRows::y);
  const int64_t group = heads / kv_heads, steps = (dim + Own::STEP - 1) / Own::STEP;
  const bool pads = dim % Own::STEP;
  const float scale = 1 / std::sqrt(float(dim)), exponent = scale * 1.44269504f;

  // Tokens [start, end) that a sequence's row sees.
  std::pair<int64_t, int64_t> seen(int64_t seq, int64_t row) const {
    const int64_t length = lengths[seq], own = length - (starts[seq + 1] - starts[seq]) + row;
    const int64_t start = std::max<int64_t>(0, own - window + 1);
    return {start, causal ? own + 1 : std::min(length, own + window)};
  }

  int64_t state_size(int64_t rows) const { return rows * (steps * HALVES + 2); }

  State state(Lanes* memory, int64_t rows) const {
    float* numbers = reinterpret_cast<float*>(memory + rows * steps * HALVES);
    return {numbers, numbers + rows, memory};
  }

  void clear(const State& state, int64_t rows) const {
    std::fill_n(state.most, rows, LEAST);
    std::fill_n(state.total, rows, 0.0f);
    std::fill_n(state.values, rows * steps * HALVES, Lanes{});
  }

  // Begin with the share of the sinks, which have no value.
  void begin(const State& state, const Block& block, int64_t head) const {
    clear(state, block.rows * group);
    for (int64_t m = 0; sinks && m < block.rows * group; m++) {
      state.most[m] = sinks[head * group + m % group] / scale;
      state.total[m] = 1;
    }
  }

  // Return the shares of a score compared with a larger one.
  Lanes share(Lanes score, float most) const { return exp2((score - most) * exponent); }

  // Add what a chunk found. A chunk without tokens of a row changes none of its numbers.
  void fold(const State& to, const State& found, int64_t rows) const {
    const int64_t size = steps * HALVES;
    for (int64_t m = 0; m < rows; m++) {
      const float most = found.most[m] > to.most[m] ? found.most[m] : to.most[m];
      const Lanes old = share(broadcast(to.most[m]), most), more = share(broadcast(found.most[m]), most);
      for (int64_t i = m * size; i < (m + 1) * size; i++)
        to.values[i] = multiply_add(found.values[i], more, to.values[i] * old);
      to.total[m] = std::fma(found.total[m], more[0], to.total[m] * old[0]);
      to.most[m] = most;
    }
  }

  void write(const State& state, const Block& block, int64_t head) const {
    for (int64_t m = 0; m < block.rows * group; m++) {
      const Lanes factor = broadcast(1 / state.total[m]), *values = state.values + m * steps * HALVES;
      const int64_t row = starts[block.seq] + block.first + m / group;
      Number* to = y + (row * heads + head * group + m % group) * dim;
      for (int64_t step = 0; step < steps; step++, values += HALVES) {
        Bits out = reinterpret_cast<Bits>(values[0] * factor);
        if constexpr (HALVES == 2) {
          Bits odd = reinterpret_cast<Bits>(values[1] * factor);
          out = rounded(out) >> 16 | (rounded(odd) & 0xffff0000u);
        }
        const int64_t left = dim - step * Own::STEP;
        std::memcpy(to + step * Own::STEP, &out, std::min<int64_t>(left, Own::STEP) * sizeof(Number));
      }
    }
  }

  static Bits rounded(Bits bits) { return bits + 0x7fff + (bits >> 16 & 1); }

  // Copy rows of a head so that each fills its last step with zeros.
  const Number* padded(Lanes* to, const Number* from) const {
    Number* copy = reinterpret_cast<Number*>(to);
    std::memcpy(copy, from, dim * sizeof(Number));
    std::fill(copy + dim, copy + steps * Own::STEP, Number(0));
    return copy;
  }

  // Write scores of R rows and T tokens. Ask for the V of these.
  template <int R, int T>
  ALONE void multiply(const Lanes* rows, const Number* const* keys, const Number* const* values, float* scores) const {
    constexpr int VECTORS = (R * T + LANES - 1) / LANES;
    Lanes sums[R * T];
    each<R * T>([&](auto i) UNROLLED { sums[i] = Lanes{}; });
    for (int64_t step = 0; step < steps; step++) {
      if (values) each<T>([&](auto t) UNROLLED { __builtin_prefetch(values[t] + step * Own::STEP); });
      each<Own::PARTS>([&](auto part) UNROLLED {
        Lanes own[R];
        each<R>([&](auto r) UNROLLED {
          in_register(own[r] = Own::part(reinterpret_cast<const Bits&>(rows[r * steps + step]), part));
        });
        each<T>([&](auto t) UNROLLED {
          Lanes key = Own::part_at(reinterpret_cast<const char*>(keys[t] + step * Own::STEP), part);
          in_register(key);
          each<R>([&](auto r) UNROLLED { sums[r * T + t] = Own::add(key, own[r], sums[r * T + t]); });
        });
      });
    }
    float flat[VECTORS * LANES];
    total<R * T>(sums);
    each<VECTORS>([&](auto i) UNROLLED { reinterpret_cast<Lanes*>(flat)[i] = sums[i]; });
    for (int r = 0; r < R; r++) std::memcpy(scores + r * PIECE, flat + r * T, T * sizeof *flat);
  }

  // Turn a row's scores of the tokens from `at` on into shares. Return the factor of its sums until now.
  ALONE float soften(float* scores, int64_t tiles, int64_t at, std::pair<int64_t, int64_t> seen, float& most,
               float& total) const {
    Lanes *tile = reinterpret_cast<Lanes*>(scores), largest = broadcast(most), sum = {};
    typedef int32_t Tokens __attribute__((vector_size(WIDTH)));
    Tokens token;
    for (int i = 0; i < LANES; i++) token[i] = i;
    const int32_t start = seen.first - at, end = seen.second - at;
    for (int64_t t = 0; t < tiles; t++, token += LANES) {
      tile[t] = (token >= start) & (token < end) ? tile[t] : broadcast(-std::numeric_limits<float>::infinity());
      largest = larger(tile[t], largest);
    }
    float next = most;
    for (int i = 0; i < LANES; i++) next = largest[i] > next ? largest[i] : next;
    for (int64_t t = 0; t < tiles; t++) sum += tile[t] = share(tile[t], next);
    for (int half = LANES / 2; half; half /= 2)
      for (int i = 0; i < half; i++) sum[i] += sum[i + half];
    const float factor = share(broadcast(most), next)[0];
    total = std::fma(total, factor, sum[0]);
    most = next;
    return factor;
  }

  // Add the values of tokens [first, last) of a piece, S steps of numbers of R rows.
  template <int R, int S>
  ALONE void add(const float* shares, const Number* const* rows, const Number* const* ahead, int64_t first, int64_t last,
                 int64_t step, const float* factors, Lanes* values) const {
    constexpr int N = S * HALVES;
    const int64_t size = steps * HALVES;
    Lanes sums[R * N];
    each<R * N>([&](auto i) UNROLLED { sums[i] = values[i / N * size + i % N] * factors[i / N]; });
    for (int64_t t = first; t < last; t++) {
      const Bits* from = reinterpret_cast<const Bits*>(rows[t] + step * Own::STEP);
      if (ahead) each<S>([&](auto i) UNROLLED { __builtin_prefetch(ahead[t] + (step + i) * Own::STEP); });
      Lanes own[N];
      each<N>([&](auto i) UNROLLED {
        const Bits numbers = from[i / HALVES];
        if constexpr (HALVES == 1) own[i] = reinterpret_cast<Lanes>(numbers);
        else own[i] = reinterpret_cast<Lanes>(i % 2 ? numbers & 0xffff0000u : numbers << 16);
      });
      each<R>([&](auto r) UNROLLED {
        const Lanes share = reinterpret_cast<Lanes>(broadcast(shares + r * PIECE + t));
        each<N>([&](auto i) UNROLLED { sums[r * N + i] = multiply_add(own[i], share, sums[r * N + i]); });
      });
    }
    each<R * N>([&](auto i) UNROLLED { values[i / N * size + i % N] = sums[i]; });
  }

  // Return the vectors of memory that `run_chunk` takes.
  int64_t chunk_size(int64_t rows) const {
    return PIECE * steps * (pads ? 2 : 0) + rows * (PIECE / LANES + steps + 1) + steps;
  }

  // Find the rows of a head's tokens [first, last) from `at` on.
  void find(const Number* numbers, int64_t seq, int64_t head, int64_t at, int64_t first, int64_t last,
            const Number** rows) const {
    int64_t number = (at + first) / page_size, in_page = (at + first) % page_size;
    for (int64_t t = first; t < last; number++, in_page = 0) {
      const int64_t slot = table[seq * columns + number] * page_size;
      for (; in_page < page_size && t < last; in_page++, t++)
        rows[t] = numbers + ((slot + in_page) * kv_heads + head) * dim;
    }
  }

  // Find the K of the piece that is read after the one at `at`, and something else where it is not known.
  void find_ahead(const Block& block, int64_t head, int64_t at, const Number** rows) const {
    at += PIECE;
    if (at >= block.end) {
      at = block.start / PIECE * PIECE;
      head = head + 1 < kv_heads ? head + 1 : 0;
    }
    const int64_t first = std::max(block.start - at, int64_t(0)), last = std::min(PIECE, block.end - at);
    find(k, block.seq, head, at, first, last, rows);
  }

  // Write the softmax of a block's rows over the tokens of a chunk.
  void run_chunk(const Block& block, int64_t head, int64_t chunk, const State& to, Lanes* memory) const {
    const int64_t rows = block.rows * group;
    auto take = [&](int64_t size) { return std::exchange(memory, memory + size); };
    float *scores = reinterpret_cast<float*>(take(rows * PIECE / LANES)), *factors = reinterpret_cast<float*>(take(rows));
    Lanes *queries = take(rows * steps), *none = take(steps), *copies = memory;
    std::fill_n(none, steps, Lanes{});
    for (int64_t m = 0; m < rows; m++)
      padded(queries + m * steps, q + (starts[block.seq] + block.first + m / group) * q_row +
                                      (head * group + m % group) * q_head);
    clear(to, rows);
    const int64_t end = std::min(block.end, (chunk + 1) * CHUNK);
    for (int64_t at = std::max(block.start, chunk * CHUNK) / PIECE * PIECE; at < end; at += PIECE) {
      const int64_t first = std::max(block.start - at, int64_t(0)), last = std::min(PIECE, end - at);
      const int64_t tiles = (last + LANES - 1) / LANES;
      const Number *k_rows[PIECE], *v_rows[PIECE], *ahead[PIECE];
      std::fill_n(ahead, PIECE, reinterpret_cast<const Number*>(none));
      find(k, block.seq, head, at, first, last, k_rows);
      find(v, block.seq, head, at, first, last, v_rows);
      find_ahead(block, head, at, ahead);
      for (int64_t t = first; pads && t < last; t++) {
        k_rows[t] = padded(copies + t * steps, k_rows[t]);
        v_rows[t] = padded(copies + (PIECE + t) * steps, v_rows[t]);
      }
      tiles_of_rows(rows, [&](auto R, int64_t m) {
        most_at_a_time<R == 1 ? 2 * OUTS : OUTS>(last - first, [&](auto T, int64_t t) {
          t += first;
          multiply<R, T>(queries + m * steps, k_rows + t, m ? nullptr : v_rows + t, scores + m * PIECE + t);
        });
      });
      for (int64_t m = 0; m < rows; m++)
        factors[m] = soften(scores + m * PIECE, tiles, at, seen(block.seq, block.first + m / group), to.most[m],
                            to.total[m]);
      rows_at_a_time(rows, [&](auto R, int64_t m) {
        most_at_a_time<SUMS / R / HALVES>(steps, [&](auto S, int64_t step) {
          add<R, S>(scores + m * PIECE, v_rows, m ? nullptr : ahead, first, last, step, factors + m,
                    to.values + (m * steps + step) * HALVES);
        });
      });
    }
  }

  std::vector<Block> blocks() const {
    std::vector<Block> found;
    const int64_t most = std::max<int64_t>(1, MOST_ROWS / group);
    for (int64_t seq = 0; seq < num_seqs; seq++) {
      const int64_t rows = starts[seq + 1] - starts[seq];
      for (int64_t first = 0; first < rows; first += most) {
        const int64_t count = std::min(most, rows - first);
        found.push_back({seq, first, count, seen(seq, first).first, seen(seq, first + count - 1).second});
      }
    }
    return found;
  }

};

// Blocks of rows and the query heads of one KV head. If they are few, threads share their chunks, and another work folds
// what they found.
struct Plan : Attention {
  using Base = Attention;
  struct Chunk {
    int64_t item, number;
    Lanes* found;
  };
  const std::vector<Block> blocks = Base::blocks();
  const int64_t num_items = int64_t(blocks.size()) * Base::kv_heads;
  std::vector<Chunk> chunks;
  std::unique_ptr<char[]> memory;

  Plan(const AttentionRows& rows, int64_t threads) : Base(rows) {
    const bool is_short = std::all_of(blocks.begin(), blocks.end(), [](const Block& own) { return own.end <= CHUNK; });
    if (threads == 1 || num_items >= 4 * threads || is_short) return;
    int64_t size = 0;
    for (int64_t item = 0; item < num_items; item++) {
      const Block& block = blocks[item / this->kv_heads];
      size = std::max(size, this->state_size(block.rows * this->group));
      for (int64_t number = block.start / CHUNK; number * CHUNK < block.end; number++)
        chunks.push_back({item, number, nullptr});
    }
    memory.reset(new char[chunks.size() * size * WIDTH]);
    for (size_t i = 0; i < chunks.size(); i++) chunks[i].found = reinterpret_cast<Lanes*>(memory.get()) + i * size;
  }

  void run_chunk(int64_t index) const {
    const Chunk& chunk = chunks[index];
    const Block& block = blocks[chunk.item / this->kv_heads];
    const int64_t rows = block.rows * this->group;
    Base::run_chunk(block, chunk.item % this->kv_heads, chunk.number, this->state(chunk.found, rows),
                    scratch<Base>(this->chunk_size(rows)));
  }

  // Write the attention of an item. Its chunks are found, or run here.
  void run_item(int64_t item) const {
    const Block& block = blocks[item / this->kv_heads];
    const int64_t head = item % this->kv_heads, rows = block.rows * this->group, size = this->state_size(rows);
    Lanes* memory = scratch<Base>(2 * size + this->chunk_size(rows));
    const State all = this->state(memory, rows), found = this->state(memory + size, rows);
    this->begin(all, block, head);
    for (const Chunk& chunk : chunks)
      if (chunk.item == item) this->fold(all, this->state(chunk.found, rows), rows);
    for (int64_t number = block.start / CHUNK; chunks.empty() && number * CHUNK < block.end; number++) {
      Base::run_chunk(block, head, number, found, memory + 2 * size);
      this->fold(all, found, rows);
    }
    this->write(all, block, head);
  }
};

// Return true for whole numbers of 32 bits in row order.
bool is_whole(const Tensor& x, int64_t dims) {
  return x.scalar_type() == ScalarType::Int && x.dim() == dims && x.is_contiguous();
}

// Return about how many multiplications the attention has.
int64_t multiplications(const AttentionRows& of) {
  int64_t pairs = 0;
  for (int64_t seq = 0; seq < of.num_seqs; seq++) pairs += int64_t(of.starts[seq + 1] - of.starts[seq]) * of.lengths[seq];
  return pairs * of.heads * of.dim;
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& starts, const Tensor& lengths,
                 const Tensor& table, int64_t page_size, bool causal, std::optional<int64_t> window,
                 const std::optional<Tensor>& sinks) {
  const int64_t rows = q.size(0), heads = q.size(1), dim = q.size(2), kv_heads = k.size(k.dim() - 2);
  auto is_own = [](const Tensor& x) { return x.scalar_type() == Own::TYPE; };
  STD_TORCH_CHECK(is_own(q) && is_own(k) && is_own(v), "attention takes q, k and v of its dtype");
  STD_TORCH_CHECK(q.dim() == 3 && q.stride(2) == 1 && k.is_contiguous() && v.is_contiguous() && k.numel() == v.numel() &&
                      k.size(k.dim() - 1) == dim && heads % kv_heads == 0,
                  "attention takes q [T, heads, D], and k and v [.., kv_heads, D] in row order");
  STD_TORCH_CHECK(is_whole(starts, 1) && is_whole(lengths, 1) && is_whole(table, 2) &&
                      starts.size(0) == lengths.size(0) + 1 && table.size(0) == lengths.size(0),
                  "attention takes starts [S + 1], lengths [S] and a page table [S, P] in int32");
  STD_TORCH_CHECK(!sinks.has_value() || (sinks->scalar_type() == ScalarType::Float && sinks->is_contiguous() &&
                                         sinks->numel() == heads),
                  "attention takes sinks [heads] in float32");
  Tensor y = torch::stable::new_empty(q, {rows, heads, dim});
  auto whole = [](const Tensor& x) { return static_cast<const int32_t*>(x.data_ptr()); };
  const AttentionRows of = {q.data_ptr(), k.data_ptr(), v.data_ptr(), y.data_ptr(),
                            sinks.has_value() ? static_cast<const float*>(sinks->data_ptr()) : nullptr,
                            whole(starts), whole(lengths), whole(table), q.stride(0), q.stride(1), lengths.size(0),
                            table.size(1), heads, kv_heads, dim, page_size, window.value_or(INT32_MAX), causal};
  const int64_t threads = threads_for(multiplications(of));
  Works works;
  add_attention(works, of, threads);
  team().run(works, threads);
  return y;
}

}  // namespace

namespace OPERATORS {

void add_attention(Works& works, const AttentionRows& of, int64_t threads) {
  const auto plan = std::make_shared<const Plan>(of, threads);
  works.push_back(std::make_unique<Function>(plan->chunks.size(), [plan](int64_t i) { plan->run_chunk(i); }));
  works.push_back(std::make_unique<Function>(plan->num_items, [plan](int64_t i) { plan->run_item(i); }));
}

}  // namespace OPERATORS

STABLE_TORCH_LIBRARY_FRAGMENT(OPERATORS, library) {
  library.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor lengths, Tensor table, int page_size, bool causal, "
      "int? window, Tensor? sinks) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(OPERATORS, CPU, library) { library.impl("attention", TORCH_BOX(&attention)); }
