// Vectors of the processor's width, numbers of the engine's dtypes in them, and threads: the operators' common parts.

#pragma once

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
#include <utility>

namespace dflash_server {

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
constexpr int64_t SMALL = 1 << 21;  // multiplications that cost less than waking a thread

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

// A kind of numbers. A step reads STEP of them at once, which are multiplied as PARTS vectors.
struct Float32 {
  using Number = float;
  static constexpr int STEP = LANES, PARTS = 1;
  static float wide(float x) { return x; }
  static Lanes part(Bits numbers, int) { return reinterpret_cast<Lanes>(numbers); }
  static Lanes add(Lanes a, Lanes b, Lanes sums) { return multiply_add(a, b, sums); }
  static void store(Lanes values, float* to) { *reinterpret_cast<Lanes*>(to) = values; }
};

struct BFloat16 {
  using Number = uint16_t;
  static constexpr int STEP = 2 * LANES;
  static float wide(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
#if defined(__AVX512BF16__)
  // The processor multiplies pairs, and adds them in fp32. It takes numbers below 2^-126 for zero.
  static constexpr int PARTS = 1;
  static Lanes part(Bits numbers, int) { return reinterpret_cast<Lanes>(numbers); }
  static Lanes add(Lanes a, Lanes b, Lanes sums) {
    return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
#else
  // Even numbers are the first part and odd ones the second, because that takes no shuffle.
  static constexpr int PARTS = 2;
  static Lanes part(Bits numbers, int part) {
    return reinterpret_cast<Lanes>(part ? numbers & 0xffff0000u : numbers << 16);
  }
  static Lanes add(Lanes a, Lanes b, Lanes sums) { return multiply_add(a, b, sums); }
#endif
  // To nearest, ties to even. NaN stays NaN: it is one of the numbers', whose lower half is zero.
  static void store(Lanes values, uint16_t* to) {
    const Bits bits = reinterpret_cast<Bits>(values), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    for (int i = 0; i < LANES; i++) to[i] = rounded[i];
  }
};

#define UNROLLED __attribute__((always_inline))

// Call one(0) to one(N - 1), with constants: GCC keeps an array in registers only if it unrolls a loop of it early.
template <int N, class One>
UNROLLED inline void each(const One& one) {
  if constexpr (N > 0) {
    each<N - 1>(one);
    one(std::integral_constant<int, N - 1>());
  }
}

// Threads that sleep between calls. The caller works too, and waits for no thread that has not begun: next to a busy
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

inline int64_t own_threads = 0;  // of an operator, or 0 for as many as PyTorch has

inline int64_t threads_for(int64_t multiplications) {
  return multiplications < SMALL ? 1 : own_threads ? own_threads : torch::stable::get_num_threads();
}

inline Helpers& helpers() {
  static Helpers* kept = new Helpers;  // its threads live as long as the process
  return *kept;
}

// Call one(0) to one(count - 1) on that many threads. A thread that another process slows down takes fewer of them.
inline void share_out(int64_t count, int64_t threads, const std::function<void(int64_t)>& one) {
  std::atomic<int64_t> next = 0;
  auto work = [&] {
    for (int64_t i; (i = next++) < count;) one(i);
  };
  threads == 1 ? work() : helpers().share(threads - 1, work);
}

// Memory of a thread that is kept from call to call.
inline Lanes* scratch(size_t size) {
  static thread_local std::unique_ptr<char[]> kept;
  static thread_local size_t kept_size = 0;
  if (size > kept_size) {
    kept.reset(new char[(size + 1) * WIDTH]);
    kept_size = size;
  }
  return reinterpret_cast<Lanes*>((reinterpret_cast<uintptr_t>(kept.get()) + WIDTH - 1) / WIDTH * WIDTH);
}

}  // namespace dflash_server
