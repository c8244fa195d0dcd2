// The operator dflash_server::rotate_into: RMSNorm and RoPE of the heads of q and k, and K and V into their slots, in
// float32 or bfloat16. A number is read once and rounded once. A row's result depends only on that row. No two rows of
// a call may have one slot, because threads would write it at once.

#include <cmath>
#include <vector>

#include "vectors.h"

using namespace dflash_server;

namespace {

constexpr int64_t BLOCK_ROWS = 8;  // that a thread takes at once
constexpr int64_t COST = 8;        // multiplications that take as long as a number of a head

// Return the lanes of x with the numbers of each pair exchanged.
template <int... I>
inline Lanes exchanged(Lanes x, std::integer_sequence<int, I...>) {
  return __builtin_shuffle(x, Bits{uint32_t(I ^ 1)...});
}

// Rows [q heads, k heads, v heads] of numbers. Rows follow one another layer by layer, and `turns` has (cos, sin) of
// each pair of a head, the same for all layers of a row. Norms are null for a model without them.
template <class Kind>
struct Rotation {
  using Number = typename Kind::Number;
  const Number* x;
  const float *q_norm, *k_norm, *turns;
  Number *q, *k, *v;
  const int32_t* slots;
  int64_t rows, row_size, heads, kv_heads, dim, layers;
  float eps;
  const int64_t size = (dim + LANES - 1) / LANES;

  void run_row(int64_t row, Lanes* numbers) const {
    Lanes *cos = numbers + size, *sin = cos + size;
    const float* turn = turns + row / layers * dim;
    for (int64_t i = 0; i < dim; i++) {
      reinterpret_cast<float*>(cos)[i] = turn[i & ~1];
      reinterpret_cast<float*>(sin)[i] = i & 1 ? turn[i] : -turn[i + 1];
    }
    const Number* from = x + row * row_size;
    const float* norm = k_norm ? k_norm + row % layers * dim : nullptr;
    const int64_t kept = slots[row] * kv_heads * dim;
    for (int64_t head = 0; head < heads; head++, from += dim)
      turn_head(from, q_norm, q + (row * heads + head) * dim, numbers);
    for (int64_t head = 0; head < kv_heads; head++, from += dim) turn_head(from, norm, k + kept + head * dim, numbers);
    std::memcpy(v + kept, from, kv_heads * dim * sizeof(Number));
  }

  void turn_head(const Number* from, const float* norm, Number* to, Lanes* numbers) const {
    const Lanes *cos = numbers + size, *sin = cos + size;
    float* own = reinterpret_cast<float*>(numbers);
    for (int64_t i = 0; i < dim; i++) own[i] = Kind::wide(from[i]);
    if (norm) {
      const float factor = 1 / std::sqrt(square(numbers) / dim + eps);
      for (int64_t i = 0; i < dim; i++) own[i] *= factor * norm[i];
    }
    constexpr auto lanes = std::make_integer_sequence<int, LANES>();
    for (int64_t i = 0; i < size; i++) {
      const Lanes turned = multiply_add(numbers[i], cos[i], exchanged(numbers[i], lanes) * sin[i]);
      Number out[LANES];
      Kind::store(turned, out);
      std::memcpy(to + i * LANES, out, std::min<int64_t>(LANES, dim - i * LANES) * sizeof(Number));
    }
  }

  // Return the sum of squares. Lanes after the last number are zeros.
  float square(const Lanes* numbers) const {
    Lanes sum = {};
    for (int64_t i = 0; i < size; i++) sum = multiply_add(numbers[i], numbers[i], sum);
    for (int half = LANES / 2; half; half /= 2)
      for (int i = 0; i < half; i++) sum[i] += sum[i + half];
    return sum[0];
  }

  void run() const {
    share_out((rows + BLOCK_ROWS - 1) / BLOCK_ROWS, threads_for(COST * rows * row_size), [&](int64_t block) {
      Lanes* numbers = scratch(3 * size);
      std::fill_n(numbers, 3 * size, Lanes{});
      for (int64_t row = block * BLOCK_ROWS; row < std::min(rows, (block + 1) * BLOCK_ROWS); row++) run_row(row, numbers);
    });
  }
};

// The numbers of a norm in fp32, which some models have next to weights in bfloat16.
struct Norm {
  std::vector<float> copy;
  const float* numbers = nullptr;

  explicit Norm(const std::optional<Tensor>& norm) {
    if (!norm.has_value()) return;
    numbers = static_cast<const float*>(norm->data_ptr());
    if (norm->scalar_type() == ScalarType::Float) return;
    const uint16_t* narrow = static_cast<const uint16_t*>(norm->data_ptr());
    copy.resize(norm->numel());
    std::transform(narrow, narrow + copy.size(), copy.begin(), BFloat16::wide);
    numbers = copy.data();
  }
};

Tensor rotate_into(const Tensor& x, const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, double eps,
                   const Tensor& turns, Tensor k, Tensor v, const Tensor& slots) {
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(x.dim() == 3 && x.is_contiguous(), "rotate_into takes rows [T, heads, D] in row order");
  const int64_t rows = x.size(0), dim = x.size(2), kv_heads = k.size(k.dim() - 2), heads = x.size(1) - 2 * kv_heads;
  STD_TORCH_CHECK(dim > 0 && kv_heads > 0, "rotate_into takes heads with numbers");
  const int64_t layers = k_norm.has_value() ? std::max<int64_t>(1, k_norm->numel() / dim) : 1;
  auto is_ours = [](ScalarType kind) { return kind == ScalarType::Float || kind == ScalarType::BFloat16; };
  auto fits = [&](const Tensor& tensor) { return tensor.scalar_type() == type && tensor.is_contiguous(); };
  auto is_norm = [&](const std::optional<Tensor>& norm) {
    return !norm.has_value() ||
           (is_ours(norm->scalar_type()) && norm->is_contiguous() && norm->size(norm->dim() - 1) == dim);
  };
  STD_TORCH_CHECK(is_ours(type) && fits(k) && fits(v) && is_norm(q_norm) && is_norm(k_norm) &&
                      (!q_norm.has_value() || q_norm->numel() == dim) && heads >= 0 && dim % 2 == 0 &&
                      k.size(k.dim() - 1) == dim && k.numel() == v.numel(),
                  "rotate_into takes rows, K and V of one dtype, and norms, in float32 or bfloat16 and in row order");
  STD_TORCH_CHECK(turns.scalar_type() == ScalarType::Float && turns.is_contiguous() && rows % layers == 0 &&
                      turns.numel() == rows / layers * dim,
                  "rotate_into takes cos and sin of each pair in float32");
  STD_TORCH_CHECK(slots.scalar_type() == ScalarType::Int && slots.is_contiguous() && slots.numel() == rows,
                  "rotate_into takes slots [T] in int32");
  const int32_t* slot = static_cast<const int32_t*>(slots.data_ptr());
  const int64_t num_slots = k.numel() / (kv_heads * dim);
  STD_TORCH_CHECK(std::all_of(slot, slot + rows, [&](int32_t own) { return 0 <= own && own < num_slots; }),
                  "rotate_into takes slots of K and V");
  Tensor q = torch::stable::new_empty(x, {rows, heads, dim});
  auto compute = [&](auto kind) {
    using Kind = decltype(kind);
    using Number = typename Kind::Number;
    auto at = [](const Tensor& tensor) { return static_cast<Number*>(tensor.data_ptr()); };
    const Norm of_q(q_norm), of_k(k_norm);
    Rotation<Kind>{at(x), of_q.numbers, of_k.numbers, static_cast<const float*>(turns.data_ptr()), at(q), at(k), at(v),
                   slot, rows, x.size(1) * dim, heads, kv_heads, dim, layers, float(eps)}
        .run();
  };
  type == ScalarType::Float ? compute(Float32()) : compute(BFloat16());
  return q;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(dflash_server, library) {
  library.def(
      "rotate_into(Tensor rows, Tensor? q_norm, Tensor? k_norm, float eps, Tensor turns, Tensor(a!) k, Tensor(b!) v, "
      "Tensor slots) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(dflash_server, CPU, library) { library.impl("rotate_into", TORCH_BOX(&rotate_into)); }
