// The operator dflash_server::linear: x @ weight.T + bias for few rows x [T, in] and a weight [out, in] in row order,
// in float32 or bfloat16. A product of few rows waits for the weight's memory, so each number is read once.
//
// Every sum over `in` is made in fp32 lanes in one order, whatever the rows and threads beside it. So a row's result
// does not depend on the batch. Products of more than `most_rows` rows go to PyTorch.
//
// The operator dflash_server::linear_float32 leaves the sums of bfloat16 in float32. It computes any number of rows,
// because PyTorch would round them.

#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#if defined(__AVX512F__)
constexpr int WIDTH = 64;
#elif defined(__AVX__)
constexpr int WIDTH = 32;
#else
constexpr int WIDTH = 16;  // SSE and NEON
#endif
constexpr int LANES = WIDTH / 4;
constexpr int STEP = 2 * LANES;  // numbers of a row that are read at once
constexpr int ROWS = 3, OUTS = 3;  // a tile's sums stay in 16 registers
constexpr int BLOCK_ROWS = 32;
constexpr int64_t DEPTH = 512;  // of a weight's rows that stay in the first cache while more rows of x pass
constexpr int64_t SMALL = 1 << 19;  // multiplications that cost less than waking a thread
constexpr int64_t CHUNK_BYTES = 1 << 17;  // of a weight that a thread takes at once

typedef float Lanes __attribute__((vector_size(WIDTH), aligned(2), may_alias));
typedef uint32_t Bits __attribute__((vector_size(WIDTH), aligned(2), may_alias));

// Return a * b + c, rounded once. GCC would make two operations of it for some processors, which takes twice as long.
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

struct Float32 {
  using Number = float;
  static float wide(float x) { return x; }
  static float narrow(float x) { return x; }
  static Lanes load(const float* from, int half) { return *reinterpret_cast<const Lanes*>(from + half * LANES); }
};

struct BFloat16 {
  using Number = uint16_t;
  static float wide(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  static uint16_t narrow(float x) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  }
  // Even numbers are the first half and odd ones the second, because that takes no shuffle.
  static Lanes load(const uint16_t* from, int half) {
    Bits pairs = *reinterpret_cast<const Bits*>(from);
    return reinterpret_cast<Lanes>(half ? pairs & 0xffff0000u : pairs << 16);
  }
};

float total(Lanes sums) {
  for (int half = LANES / 2; half; half /= 2) {
    Bits other;
    for (int i = 0; i < LANES; i++) other[i] = i ^ half;
    sums += __builtin_shuffle(sums, other);
  }
  return sums[0];
}

// Add the products of R rows of x with O rows of the weight over `depth` numbers. Rows of x are `x_stride` apart.
template <class Kind, int R, int O>
inline void add_tile(Lanes (*sums)[OUTS], const float* x, int64_t x_stride, const typename Kind::Number* weight,
                     int64_t in, int64_t depth, bool reads_ahead) {
  Lanes own[R][O];
  for (int r = 0; r < R; r++)
    for (int o = 0; o < O; o++) own[r][o] = sums[r][o];
  auto add = [&](int64_t k) {
    for (int half = 0; half < 2; half++) {
      Lanes right[R];
      for (int r = 0; r < R; r++) right[r] = *reinterpret_cast<const Lanes*>(x + r * x_stride + k + half * LANES);
      for (int o = 0; o < O; o++) {
        const Lanes left = Kind::load(weight + o * in + k, half);
        for (int r = 0; r < R; r++) own[r][o] = multiply_add(left, right[r], own[r][o]);
      }
    }
  };
  if (reads_ahead)
    for (int64_t k = 0; k < depth; k += STEP) {
      for (int o = 0; o < O; o++) __builtin_prefetch(weight + (O + o) * in + k);
      add(k);
    }
  else
    for (int64_t k = 0; k < depth; k += STEP) add(k);
  for (int r = 0; r < R; r++)
    for (int o = 0; o < O; o++) sums[r][o] = own[r][o];
}

template <class Kind, int O>
void add_rows(int64_t rows, Lanes (*sums)[OUTS], const float* x, int64_t x_stride,
              const typename Kind::Number* weight, int64_t in, int64_t depth, bool reads_ahead) {
  for (int64_t r = 0; r < rows; r += ROWS, sums += ROWS, x += ROWS * x_stride, reads_ahead = false) {
    auto tile = rows - r == 1 ? add_tile<Kind, 1, O> : rows - r == 2 ? add_tile<Kind, 2, O> : add_tile<Kind, ROWS, O>;
    tile(sums, x, x_stride, weight, in, depth, reads_ahead);
  }
}

// Threads that sleep between products. The caller works too, and waits for no thread that has not begun: beside a busy
// process a thread may wait milliseconds for its core, and a barrier would wait with it.
class Helpers {
 public:
  // Run `work` on this thread and on up to `count` others. It returns when all that began it are done.
  void share(int64_t count, const std::function<void()>& work) {
    {
      std::lock_guard lock(mutex_);
      for (; started_ < count; started_++) std::thread([this] { help(); }).detach();
      work_ = &work;
      places_ = count;
    }
    wake_.notify_all();
    work();
    std::unique_lock lock(mutex_);
    work_ = nullptr;
    done_.wait(lock, [this] { return active_ == 0; });
  }

 private:
  void help() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return work_ && places_ > 0; });
      const std::function<void()>& work = *work_;
      places_--;
      active_++;
      lock.unlock();
      work();
      lock.lock();
      if (--active_ == 0) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void()>* work_ = nullptr;
  int64_t started_ = 0, places_ = 0, active_ = 0;
};

Helpers& helpers() {
  static Helpers* kept = new Helpers;  // its threads live as long as the process
  return *kept;
}

// A product as the threads share it. x is [rows, x_stride] in fp32, in the order of `Kind::load`, zero behind `in`.
template <class Kind, class Result>
struct Product {
  using Number = typename Kind::Number;
  const float* x;
  int64_t x_stride, rows, in, out;
  const Number *weight, *bias;
  typename Result::Number* y;

  template <int O>
  void outputs(int64_t at) const {
    const Number* own = weight + at * in;
    const int64_t whole = in / STEP * STEP;
    Number rest[O][STEP];
    if (whole < in) {
      std::memset(rest, 0, sizeof rest);
      for (int o = 0; o < O; o++) std::memcpy(rest[o], own + o * in + whole, (in - whole) * sizeof(Number));
    }
    for (int64_t start = 0; start < rows; start += BLOCK_ROWS) {
      const int64_t count = std::min<int64_t>(BLOCK_ROWS, rows - start), depth = count > ROWS ? DEPTH : whole;
      const float* block = x + start * x_stride;
      Lanes sums[BLOCK_ROWS][OUTS];
      std::memset(sums, 0, count * sizeof sums[0]);
      for (int64_t k = 0; k < whole; k += depth)
        add_rows<Kind, O>(count, sums, block + k, x_stride, own + k, in, std::min(depth, whole - k), start == 0);
      if (whole < in) add_rows<Kind, O>(count, sums, block + whole, x_stride, rest[0], STEP, STEP, false);
      for (int64_t r = 0; r < count; r++)
        for (int o = 0; o < O; o++)
          y[(start + r) * out + at + o] = Result::narrow(total(sums[r][o]) + (bias ? Kind::wide(bias[at + o]) : 0.0f));
    }
  }

  void run() const {
    const int64_t tiles = (out + OUTS - 1) / OUTS;
    auto run_tiles = [&](int64_t first, int64_t last) {
      for (int64_t at = first * OUTS; at < std::min(last * OUTS, out);) {
        const bool is_whole = at + OUTS <= out;
        is_whole ? outputs<OUTS>(at) : outputs<1>(at);
        at += is_whole ? OUTS : 1;
      }
    };
    const int64_t threads = rows * in * out < SMALL ? 1 : torch::stable::get_num_threads();
    if (threads == 1) return run_tiles(0, tiles);
    const int64_t bytes = OUTS * in * int64_t(sizeof(Number));
    const int64_t chunk = std::clamp<int64_t>(CHUNK_BYTES / bytes, 1, std::max<int64_t>(1, tiles / (4 * threads)));
    std::atomic<int64_t> next = 0;  // a thread that another process slows down takes fewer chunks
    helpers().share(threads - 1, [&] {
      for (int64_t first; (first = next.fetch_add(chunk)) < tiles;) run_tiles(first, std::min(first + chunk, tiles));
    });
  }
};

// Memory of a thread that is kept from call to call.
float* scratch(size_t size) {
  static thread_local std::unique_ptr<float[]> kept;
  static thread_local size_t kept_size = 0;
  constexpr size_t LINE = 64;
  if (size > kept_size) {
    kept.reset(new float[size + LINE / sizeof(float)]);
    kept_size = size;
  }
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(kept.get()) + LINE - 1) / LINE * LINE);
}

template <class Kind, class Result = Kind>
void multiply(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, Tensor& y) {
  using Number = typename Kind::Number;
  const int64_t rows = x.size(0), in = x.size(1), out = weight.size(0), whole = in / STEP * STEP;
  // A line more between rows, because rows at multiples of 4 KiB would share the same few lines of a cache.
  const int64_t stride = (in + STEP - 1) / STEP * STEP + 16;
  float* wide = scratch(rows * stride);
  auto widen = [](const Number* from, float* to) {
    for (int half = 0; half < 2; half++) *reinterpret_cast<Lanes*>(to + half * LANES) = Kind::load(from, half);
  };
  const Number* numbers = static_cast<const Number*>(x.data_ptr());
  for (int64_t r = 0; r < rows; r++) {
    const Number* from = numbers + r * in;
    float* to = wide + r * stride;
    for (int64_t k = 0; k < whole; k += STEP) widen(from + k, to + k);
    if (whole == in) continue;
    Number rest[STEP] = {};
    std::memcpy(rest, from + whole, (in - whole) * sizeof(Number));
    widen(rest, to + whole);
  }
  const void* added = bias.has_value() ? bias->data_ptr() : nullptr;
  Product<Kind, Result>{wide, stride, rows, in, out, static_cast<const Number*>(weight.data_ptr()),
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
  const bool same = (type == ScalarType::Float || type == ScalarType::BFloat16) && weight.scalar_type() == type && (!bias.has_value() || bias->scalar_type() == type);
  const bool in_order = x.is_contiguous() && weight.is_contiguous() && (!bias.has_value() || bias->is_contiguous());
  return same && in_order && x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1);
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

}  // namespace

STABLE_TORCH_LIBRARY(dflash_server, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def("linear_float32(Tensor x, Tensor weight) -> Tensor");
  library.def("set_most_rows(int out_features, int in_features, bool is_float32, int rows) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(dflash_server, CPU, library) {
  library.impl("linear", TORCH_BOX(&linear));
  library.impl("linear_float32", TORCH_BOX(&linear_float32));
}

STABLE_TORCH_LIBRARY_IMPL(dflash_server, CompositeExplicitAutograd, library) {
  library.impl("set_most_rows", TORCH_BOX(&set_most_rows));
}
