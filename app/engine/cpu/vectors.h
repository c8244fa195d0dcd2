// Vectors of the processor's width, and numbers in them. The compiler's flags name a library's kind of numbers, OWN, and
// the namespace of its operators, OPERATORS: dflash_server_float32 or dflash_server_bfloat16.

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
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace OPERATORS {

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
  static constexpr ScalarType TYPE = ScalarType::Float;
  static constexpr int STEP = LANES, PARTS = 1;
  static float wide(float x) { return x; }
  static Lanes part(Bits numbers, int) { return reinterpret_cast<Lanes>(numbers); }
  static Lanes part_at(const char* at, int) { return *reinterpret_cast<const Lanes*>(at); }
  static Lanes add(Lanes a, Lanes b, Lanes sums) { return multiply_add(a, b, sums); }
  static float narrow(float x) { return x; }
  static void store(Lanes values, float* to) { *reinterpret_cast<Lanes*>(to) = values; }
};

struct BFloat16 {
  using Number = uint16_t;
  static constexpr ScalarType TYPE = ScalarType::BFloat16;
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
  static Lanes part_at(const char* at, int i) { return part(*reinterpret_cast<const Bits*>(at), i); }
  // To nearest, ties to even. NaN stays NaN: it is one of the numbers', whose lower half is zero.
  static void store(Lanes values, uint16_t* to) {
    const Bits bits = reinterpret_cast<Bits>(values), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    for (int i = 0; i < LANES; i++) to[i] = rounded[i];
  }
  static uint16_t narrow(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  }
};

using Own = OWN;

#define UNROLLED __attribute__((always_inline))

// Call one(0) to one(N - 1), with constants: GCC keeps an array in registers only if it unrolls a loop of it early.
template <int N, class One>
UNROLLED inline void each(const One& one) {
  if constexpr (N > 0) {
    each<N - 1>(one);
    one(std::integral_constant<int, N - 1>());
  }
}

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

// Sizes of a tile of a product, whose sums stay in registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int ROWS = 4, OUTS = 6;  // of 32 registers a tile has 24 for its sums
#else
constexpr int ROWS = 3, OUTS = 4;  // of 16 registers 12
#endif
constexpr int BLOCK_ROWS = 8 * ROWS;

// Call one(R, first) for R rows at a time, which lie in one block of BLOCK_ROWS.
template <class One>
inline void tiles_of_rows(int64_t rows, const One& one) {
  for (int64_t r = 0; r < rows; r += ROWS) {
    const int64_t left = std::min(rows - r, BLOCK_ROWS - r % BLOCK_ROWS);
    if (left == ROWS + 1) one(std::integral_constant<int, ROWS - 1>(), r--);  // two follow, not one
    else if (left >= ROWS) one(std::integral_constant<int, ROWS>(), r);
    else if (left == 1) one(std::integral_constant<int, 1>(), r);
    else if (left == 2) one(std::integral_constant<int, 2>(), r);
    else one(std::integral_constant<int, ROWS - 1>(), r);
  }
}

// Keep a vector in a register: else GCC loads it for each multiplication.
inline void in_register(Lanes& x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__AVX__)
  asm("" : "+x"(x));
#endif
}

// Return 2^x, x <= 0, by its Taylor series around the next whole number. Below 2^-126 it is 0, and NaN stays NaN.
inline Lanes exp2(Lanes x) {
  constexpr float ROUNDING = 3 << 22;  // added, it leaves a number of up to 22 bits in the lowest ones
  constexpr float TERMS[] = {1.5252734e-5f, 1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f,
                             5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f};
  const Lanes shifted = x + ROUNDING, rest = x - (shifted - ROUNDING);
  Lanes sum = Lanes{} + TERMS[0];
  for (int i = 1; i < 8; i++) sum = multiply_add(sum, rest, Lanes{} + TERMS[i]);
  const Lanes power = reinterpret_cast<Lanes>((reinterpret_cast<Bits>(shifted) + 127) << 23);
  return x < -126.0f ? Lanes{} : sum * power;
}

// Widen numbers, whose last vector is filled with zeros.
inline void widen(const Own::Number* from, int64_t count, Lanes* to) {
  to[(count - 1) / LANES] = Lanes{};
  for (int64_t i = 0; i < count; i++) reinterpret_cast<float*>(to)[i] = Own::wide(from[i]);
}

// Round numbers, some of which end before a vector does.
inline void narrow(const Lanes* from, int64_t count, Own::Number* to) {
  const int64_t whole = count / LANES * LANES;
  for (int64_t i = 0; i < whole; i += LANES) Own::store(from[i / LANES], to + i);
  if (whole == count) return;
  Own::Number numbers[LANES];
  Own::store(from[whole / LANES], numbers);
  std::memcpy(to + whole, numbers, (count - whole) * sizeof numbers[0]);
}

// Return the factor of RMSNorm of `count` numbers. The rest of the last vector is zeros.
inline float rms_factor(const Lanes* numbers, int64_t count, float eps) {
  Lanes sum = {};
  for (int64_t i = 0; i * LANES < count; i++) sum = multiply_add(numbers[i], numbers[i], sum);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) sum[i] += sum[i + half];
  return 1 / std::sqrt(sum[0] / count + eps);
}

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

inline void check_slots(const Tensor& slots, const Tensor& k) {
  const int32_t* slot = static_cast<const int32_t*>(slots.data_ptr());
  const int64_t num_slots = k.numel() / (k.size(k.dim() - 2) * k.size(k.dim() - 1));
  STD_TORCH_CHECK(std::all_of(slot, slot + slots.numel(), [&](int32_t own) { return 0 <= own && own < num_slots; }),
                  "slots must be those of K and V");
}

// Memory of a thread for each use of `Tag`, which is kept from call to call.
template <class Tag>
inline Lanes* scratch(size_t size) {
  static thread_local std::unique_ptr<char[]> kept;
  static thread_local size_t kept_size = 0;
  if (size > kept_size) {
    kept.reset(new char[(size + 1) * WIDTH]);
    kept_size = size;
  }
  return reinterpret_cast<Lanes*>((reinterpret_cast<uintptr_t>(kept.get()) + WIDTH - 1) / WIDTH * WIDTH);
}

}  // namespace OPERATORS
