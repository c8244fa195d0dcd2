// The operator rotate_into: RMSNorm and RoPE of the heads of q and k, and K and V into their slots, in
// the library's dtype. A number is read once and rounded once. A row's result depends only on that row. No two rows of
// a call may have one slot, because threads would write it at once.

#include "vectors.h"
#include "work.h"

using namespace OPERATORS;

namespace {

constexpr int64_t MOST_ROWS = 8;  // that a thread takes at once
constexpr int64_t COST = 8;        // multiplications that take as long as a number of a head

// Return the lanes of x with the numbers of each pair exchanged.
template <int... I>
inline Lanes exchanged(Lanes x, std::integer_sequence<int, I...>) {
  return __builtin_shuffle(x, Bits{uint32_t(I ^ 1)...});
}

// `rows_at_once` rows are a part.
struct RotationWork : Work {
  using Number = Own::Number;
  const RotatedRows of;
  const int64_t dim = of.dim, size = (dim + LANES - 1) / LANES, rows_at_once;

  RotationWork(const RotatedRows& of, int64_t rows_at_once)
      : Work((of.rows + rows_at_once - 1) / rows_at_once), of(of), rows_at_once(rows_at_once) {}

  void run_row(int64_t row, Lanes* numbers) const {
    Lanes *cos = numbers + size, *sin = cos + size;
    const float* turn = of.turns + row / of.layers * dim;
    for (int64_t i = 0; i < dim; i++) {
      reinterpret_cast<float*>(cos)[i] = turn[i & ~1];
      reinterpret_cast<float*>(sin)[i] = i & 1 ? turn[i] : -turn[i + 1];
    }
    const Number* from = static_cast<const Number*>(of.x) + row * of.row_size;
    const float* norm = of.k_norm ? of.k_norm + row % of.layers * dim : nullptr;
    const int64_t kept = of.slots[row] * of.kv_heads * dim;
    Number *q = static_cast<Number*>(of.q) + row * of.heads * dim, *k = static_cast<Number*>(of.k) + kept;
    for (int64_t head = 0; head < of.heads; head++, from += dim) turn_head(from, of.q_norm, q + head * dim, numbers);
    for (int64_t head = 0; head < of.kv_heads; head++, from += dim) turn_head(from, norm, k + head * dim, numbers);
    std::memcpy(static_cast<Number*>(of.v) + kept, from, of.kv_heads * dim * sizeof(Number));
  }

  void turn_head(const Number* from, const float* norm, Number* to, Lanes* numbers) const {
    const Lanes *cos = numbers + size, *sin = cos + size;
    float* own = reinterpret_cast<float*>(numbers);
    widen(from, dim, numbers);
    if (norm) {
      const float factor = rms_factor(numbers, dim, of.eps);
      for (int64_t i = 0; i < dim; i++) own[i] *= factor * norm[i];
    }
    constexpr auto lanes = std::make_integer_sequence<int, LANES>();
    for (int64_t i = 0; i < size; i++)
      numbers[i] = multiply_add(numbers[i], cos[i], exchanged(numbers[i], lanes) * sin[i]);
    narrow(numbers, dim, to);
  }

  void run(int64_t part) const override {
    Lanes* numbers = scratch<RotationWork>(3 * size);
    std::fill_n(numbers, 3 * size, Lanes{});
    for (int64_t row = part * rows_at_once; row < std::min(of.rows, (part + 1) * rows_at_once); row++)
      run_row(row, numbers);
  }
};

Tensor rotate_into(const Tensor& x, const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, double eps,
                   const Tensor& turns, Tensor k, Tensor v, const Tensor& slots) {
  STD_TORCH_CHECK(x.dim() == 3 && x.is_contiguous(), "rotate_into takes rows [T, heads, D] in row order");
  const int64_t rows = x.size(0), dim = x.size(2), kv_heads = k.size(k.dim() - 2), heads = x.size(1) - 2 * kv_heads;
  STD_TORCH_CHECK(dim > 0 && kv_heads > 0, "rotate_into takes heads with numbers");
  const int64_t layers = k_norm.has_value() ? std::max<int64_t>(1, k_norm->numel() / dim) : 1;
  auto is_ours = [](ScalarType kind) { return kind == ScalarType::Float || kind == ScalarType::BFloat16; };
  auto fits = [&](const Tensor& tensor) { return tensor.scalar_type() == Own::TYPE && tensor.is_contiguous(); };
  auto is_norm = [&](const std::optional<Tensor>& norm) {
    return !norm.has_value() ||
           (is_ours(norm->scalar_type()) && norm->is_contiguous() && norm->size(norm->dim() - 1) == dim);
  };
  STD_TORCH_CHECK(x.scalar_type() == Own::TYPE && fits(k) && fits(v) && is_norm(q_norm) && is_norm(k_norm) &&
                      (!q_norm.has_value() || q_norm->numel() == dim) && heads >= 0 && dim % 2 == 0 &&
                      k.size(k.dim() - 1) == dim && k.numel() == v.numel(),
                  "rotate_into takes rows, K and V of its dtype, and norms in float32 or bfloat16, in row order");
  STD_TORCH_CHECK(turns.scalar_type() == ScalarType::Float && turns.is_contiguous() && rows % layers == 0 &&
                      turns.numel() == rows / layers * dim,
                  "rotate_into takes cos and sin of each pair in float32");
  STD_TORCH_CHECK(slots.scalar_type() == ScalarType::Int && slots.is_contiguous() && slots.numel() == rows,
                  "rotate_into takes slots [T] in int32");
  check_slots(slots, k);
  Tensor q = torch::stable::new_empty(x, {rows, heads, dim});
  const Norm of_q(q_norm), of_k(k_norm);
  const RotatedRows of = {x.data_ptr(), of_q.numbers, of_k.numbers, static_cast<const float*>(turns.data_ptr()),
                          q.data_ptr(), k.data_ptr(), v.data_ptr(),
                          static_cast<const int32_t*>(slots.data_ptr()), rows, x.size(1) * dim, heads, kv_heads, dim,
                          layers, float(eps)};
  const int64_t threads = threads_for(COST * rows * x.size(1) * dim);
  Works works;
  add_rotation(works, of, threads);
  team().run(works, threads);
  return q;
}

}  // namespace

namespace OPERATORS {

void add_rotation(Works& works, const RotatedRows& of, int64_t threads) {
  const int64_t rows_at_once = std::clamp<int64_t>(of.rows / (4 * threads), 1, MOST_ROWS);
  works.push_back(std::make_unique<RotationWork>(of, rows_at_once));
}

}  // namespace OPERATORS

STABLE_TORCH_LIBRARY_FRAGMENT(OPERATORS, library) {
  library.def(
      "rotate_into(Tensor rows, Tensor? q_norm, Tensor? k_norm, float eps, Tensor turns, Tensor(a!) k, Tensor(b!) v, "
      "Tensor slots) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(OPERATORS, CPU, library) { library.impl("rotate_into", TORCH_BOX(&rotate_into)); }
