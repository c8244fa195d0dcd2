// The operators decoder and context: a whole forward of a dense decoder, and the context KV
// of a draft. Threads go from one work to the next without a return to Python. Sums are in fp32, and numbers are rounded
// to the engine's dtype where the layers' operators would. A row's result does not depend on the other rows.

#include "vectors.h"
#include "work.h"

using namespace OPERATORS;

namespace {

// A layer as a table of addresses has it. Norms and sinks are in fp32, and the residual stream behind it is feature
// `tap`, or none for -1.
struct Layer {
  int64_t input_norm, qkv, qkv_bias, q_norm, k_norm, sinks, o, o_bias, post_norm, gate_up, down;
  int64_t qkv_scales, o_scales, gate_up_scales, down_scales;  // of weights in int8
  int64_t window, is_causal, tap;
};

float* floats(int64_t address) { return reinterpret_cast<float*>(address); }
void* numbers(int64_t address) { return reinterpret_cast<void*>(address); }
const float* floats(const Tensor& x) { return static_cast<const float*>(x.data_ptr()); }
const int32_t* whole(const Tensor& x) { return static_cast<const int32_t*>(x.data_ptr()); }

// Works of tensors of the library's dtype.
struct Forward {
  const int64_t threads;
  static constexpr int64_t size = sizeof(Own::Number);
  Works works = {};
  char* kept = nullptr;

  void keep(int64_t numbers) { kept = reinterpret_cast<char*>(scratch<Forward>((numbers * size + WIDTH - 1) / WIDTH)); }
  char* take(int64_t numbers) { return std::exchange(kept, kept + numbers * size); }
  void product(const Product& of) { add_product(works, of, threads); }
  void run() { team().run(works, threads); }
};

// Let `x` [T, H] be the embedded rows, which become the residual stream. K and V are those of all layers.
void decoder(Tensor x, const Tensor& layers, int64_t heads, int64_t inner, double eps, const Tensor& norm,
             const Tensor& turns, const Tensor& slots, const Tensor& starts, const Tensor& lengths, const Tensor& table,
             const Tensor& k, const Tensor& v, Tensor hidden, std::optional<Tensor> features) {
  const Layer* first = static_cast<const Layer*>(layers.data_ptr());
  const int64_t num_layers = layers.size(0), rows = x.size(0), width = x.size(1);
  const int64_t kv_heads = k.size(k.dim() - 2), dim = k.size(k.dim() - 1), page_size = k.size(1);
  const int64_t heads_size = heads * dim, qkv_size = heads_size + 2 * kv_heads * dim, of_layer = k.numel() / num_layers;
  check_slots(slots, k);
  STD_TORCH_CHECK(layers.size(1) == int64_t(sizeof(Layer) / 8) && x.is_contiguous() && turns.is_contiguous() &&
                      turns.numel() == rows * dim && x.scalar_type() == Own::TYPE && k.scalar_type() == Own::TYPE,
                  "decoder takes rows [T, H] and K of its dtype, and cos and sin of each pair, in row order");
  Forward of = {threads_for(rows * num_layers * width * (qkv_size + heads_size + 3 * inner))};
  of.keep(rows * (qkv_size + 2 * heads_size + 2 * inner));
  char *qkv = of.take(rows * qkv_size), *q = of.take(rows * heads_size), *o = of.take(rows * heads_size);
  char *gate_up = of.take(rows * 2 * inner), *residual = static_cast<char*>(x.data_ptr());
  const Rows stream = {residual, rows, width, width, nullptr, float(eps)};
  auto normed = [&](const float* norm) {
    Rows rows = stream;
    rows.norm = norm;
    return rows;
  };
  for (int64_t i = 0; i < num_layers; i++) {
    const Layer& layer = first[i];
    char *own_k = static_cast<char*>(k.data_ptr()) + i * of_layer * of.size;
    char *own_v = static_cast<char*>(v.data_ptr()) + i * of_layer * of.size;
    of.product({normed(floats(layer.input_norm)), qkv_size, numbers(layer.qkv), numbers(layer.qkv_bias), qkv,
                floats(layer.qkv_scales)});
    add_rotation(of.works,
                 {qkv, floats(layer.q_norm), floats(layer.k_norm), floats(turns), q, own_k, own_v, whole(slots), rows,
                  qkv_size, heads, kv_heads, dim, 1, float(eps)},
                 of.threads);
    add_attention(of.works,
                  {q, own_k, own_v, o, floats(layer.sinks), whole(starts), whole(lengths), whole(table), heads_size, dim,
                   lengths.numel(), table.size(1), heads, kv_heads, dim, page_size, layer.window, layer.is_causal != 0},
                  of.threads);
    of.product({{o, rows, heads_size, heads_size}, width, numbers(layer.o), numbers(layer.o_bias), residual,
                floats(layer.o_scales), residual});
    of.product({normed(floats(layer.post_norm)), 2 * inner, numbers(layer.gate_up), nullptr, gate_up,
                floats(layer.gate_up_scales)});
    const Rows gated = {gate_up, rows, inner, 2 * inner, nullptr, 0, false, true};
    Product down = {gated, width, numbers(layer.down), nullptr, residual, floats(layer.down_scales), residual};
    if (layer.tap >= 0) {
      down.also = static_cast<char*>(features->data_ptr()) + layer.tap * width * of.size;
      down.also_stride = features->size(1);
    }
    of.product(down);
  }
  add_rows(of.works, normed(floats(norm)), hidden.data_ptr());
  of.run();
}

// Write the context KV of features [T, in]: fc, norm, K and V of all layers in one product, and RoPE.
void context(const Tensor& features, const Tensor& fc, const Tensor& norm, const Tensor& kv,
             const std::optional<Tensor>& bias, const Tensor& k_norm, double eps, const Tensor& turns, const Tensor& slots,
             Tensor k, Tensor v) {
  const int64_t rows = features.size(0), in = features.size(1), width = fc.size(0), out = kv.size(0);
  const int64_t kv_heads = k.size(k.dim() - 2), dim = k.size(k.dim() - 1), layers = k_norm.numel() / dim;
  check_slots(slots, k);
  STD_TORCH_CHECK(features.is_contiguous() && fc.size(1) == in && features.scalar_type() == Own::TYPE && k.scalar_type() == Own::TYPE,
                  "context takes features [T, in] and K of its dtype in row order");
  const Norm hidden_norm(norm), of_k(k_norm);
  Forward of = {threads_for(rows * width * (in + out))};
  of.keep(rows * (width + out));
  char *mixed = of.take(rows * width), *projected = of.take(rows * out);
  of.product({{features.data_ptr(), rows, in, in}, width, fc.data_ptr(), nullptr, mixed});
  of.product({{mixed, rows, width, width, hidden_norm.numbers, float(eps), true}, out, kv.data_ptr(),
              bias.has_value() ? bias->data_ptr() : nullptr, projected});
  add_rotation(of.works,
               {projected, nullptr, of_k.numbers, floats(turns), nullptr, k.data_ptr(), v.data_ptr(), whole(slots),
                rows * layers, 2 * kv_heads * dim, 0, kv_heads, dim, layers, float(eps)},
               of.threads);
  of.run();
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(OPERATORS, library) {
  library.def(
      "decoder(Tensor(a!) x, Tensor layers, int heads, int inner, float eps, Tensor norm, Tensor turns, Tensor slots, "
      "Tensor starts, Tensor lengths, Tensor table, Tensor k, Tensor v, Tensor(b!) hidden, Tensor(c!)? features) -> ()");
  library.def(
      "context(Tensor features, Tensor fc, Tensor norm, Tensor kv, Tensor? bias, Tensor k_norm, float eps, Tensor turns, "
      "Tensor slots, Tensor(a!) k, Tensor(b!) v) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(OPERATORS, CPU, library) {
  library.impl("decoder", TORCH_BOX(&decoder));
  library.impl("context", TORCH_BOX(&context));
}
