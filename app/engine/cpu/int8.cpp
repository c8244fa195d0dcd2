// Products of rows with a weight in int8 that has a scale a row, for any number of rows. Rows are rounded to int8, too:
// GROUP numbers by one scale, their largest over 127. Sums in a group are whole numbers, which are exact in any order,
// and the groups' are added in fp32, one after the other. So a row's result depends neither on other rows nor on threads
// nor on the instructions of a processor with FMA. A number that is not finite makes all outputs of its row NaN.
//
// A weight is read in panels of PANEL rows, which the operator pack_int8 makes: the first DEPTH numbers of each row,
// then the next ones of each. So a lane has the sums of one output, and one row of x waits for a single stream of memory.

#include "vectors.h"
#include "work.h"

using namespace OPERATORS;

namespace {

constexpr int GROUP = 32, PANEL = std::max(16, 2 * LANES), DEPTH = 4, LINE = 64;
constexpr int VECTORS = PANEL / LANES;  // of a panel
constexpr int64_t BLOCK_BYTES = 1 << 18;  // of x, which the second cache holds

typedef int32_t Whole __attribute__((vector_size(WIDTH), may_alias));

// WIDTH bytes of a panel. `add` adds the products with DEPTH numbers of a row, which each lane of `x` repeats, to lanes
// that begin with `start` of the row's group.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr bool SHIFTED = true;  // numbers of a weight are 128 larger, because one factor has no sign
struct Left {
  Whole numbers;
  explicit Left(const int8_t* at) { std::memcpy(&numbers, at, WIDTH); }
  Whole add(Whole x, Whole sums) const {
#if defined(__AVX512VNNI__)
    return Whole(_mm512_dpbusd_epi32(__m512i(sums), __m512i(numbers), __m512i(x)));
#else
    return Whole(_mm256_dpbusd_avx_epi32(__m256i(sums), __m256i(numbers), __m256i(x)));
#endif
  }
};
#else
constexpr bool SHIFTED = false;
#if defined(__AVX512BW__)
struct Left {
  __m512i size;
  __mmask64 negative;
  explicit Left(const int8_t* at) {
    const __m512i numbers = _mm512_loadu_si512(at);
    size = _mm512_abs_epi8(numbers);
    negative = _mm512_movepi8_mask(numbers);
  }
  Whole add(Whole x, Whole sums) const {  // pairs fit in 16 bits, because no number of x is -128
    const __m512i signed_x = _mm512_mask_sub_epi8(__m512i(x), negative, __m512i{}, __m512i(x));
    return sums + Whole(_mm512_madd_epi16(_mm512_maddubs_epi16(size, signed_x), _mm512_set1_epi16(1)));
  }
};
#elif defined(__AVX2__) && !defined(__AVX512F__)
struct Left {
  __m256i numbers, size;
  explicit Left(const int8_t* at) {
    numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    size = _mm256_abs_epi8(numbers);
  }
  Whole add(Whole x, Whole sums) const {  // pairs fit in 16 bits, because no number of x is -128
    const __m256i signed_x = _mm256_sign_epi8(__m256i(x), numbers);
    return sums + Whole(_mm256_madd_epi16(_mm256_maddubs_epi16(size, signed_x), _mm256_set1_epi16(1)));
  }
};
#elif defined(__aarch64__)
struct Left {
  int8x16_t numbers;
  explicit Left(const int8_t* at) : numbers(vld1q_s8(at)) {}
  Whole add(Whole x, Whole sums) const {
    const int8x16_t right = int8x16_t(x);
#if defined(__ARM_FEATURE_DOTPROD)
    return Whole(vdotq_s32(int32x4_t(sums), numbers, right));
#else  // pairs fit in 16 bits, because no number of x is -128
    const int16x8_t low = vmull_s8(vget_low_s8(numbers), vget_low_s8(right)), high = vmull_high_s8(numbers, right);
    return Whole(vaddq_s32(int32x4_t(sums), vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high))));
#endif
  }
};
#else
struct Left {
  int8_t numbers[WIDTH];
  explicit Left(const int8_t* at) { std::memcpy(numbers, at, WIDTH); }
  Whole add(Whole x, Whole sums) const {
    int8_t right[WIDTH];
    std::memcpy(right, &x, WIDTH);
    for (int i = 0; i < WIDTH; i++) sums[i / DEPTH] += numbers[i] * right[i];
    return sums;
  }
};
#endif
#endif

// A tile has up to MOST_ROWS rows and one panel, whose sums stay in registers.
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 6;
#else
constexpr int MOST_ROWS = 4;
#endif

// What a group of a row multiplies its sums by, and what they begin with.
struct Group {
  float scale;
  int32_t start;
};

// Rows in int8, each followed by its groups.
struct Int8Rows {
  const Rows of;
  const int64_t groups = (of.size + GROUP - 1) / GROUP, stride = groups * (GROUP + int64_t(sizeof(Group)));
  std::vector<char>& memory = kept();

  explicit Int8Rows(const Rows& of) : of(of) {
    if (const size_t size = of.count * stride; memory.size() < size) memory.resize(size);
  }

  // Memory of the thread that waits for a forward, whose products use it one after the other.
  static std::vector<char>& kept() {
    static thread_local std::vector<char> memory;
    return memory;
  }

  const int8_t* row(int64_t i) const { return reinterpret_cast<const int8_t*>(memory.data() + i * stride); }

  void round(int64_t i) const {
    constexpr float ROUNDING = 3 << 22, LEAST = 1e-30f;  // added, it leaves a whole number in the lowest bits
    constexpr int IN_GROUP = GROUP / LANES;
    struct Numbers;
    Lanes* wide = scratch<Numbers>(2 * groups * IN_GROUP);
    auto* numbers = reinterpret_cast<Own::Number*>(wide + groups * IN_GROUP);
    read_row(of, i, numbers);
    std::fill(wide + of.size / LANES, wide + groups * IN_GROUP, Lanes{});
    widen(numbers, of.size, wide);
    int8_t* to = const_cast<int8_t*>(row(i));
    Group* group = reinterpret_cast<Group*>(to + groups * GROUP);
    for (int64_t g = 0; g < groups; g++, wide += IN_GROUP, to += GROUP, group++) {
      uint32_t bits[GROUP], most = 0, total = 0;
      std::memcpy(bits, wide, sizeof bits);
      for (uint32_t own : bits) most = std::max(most, own & 0x7fffffff);  // infinity and NaN are the largest
      float largest;
      std::memcpy(&largest, &most, sizeof largest);
      const bool is_finite = std::isfinite(largest);
      largest = is_finite ? std::max(largest, LEAST) : 1;
      const Lanes inverse = 127 / largest - Lanes{};
      for (int k = 0; k < IN_GROUP; k++) {
        const Lanes rounded = multiply_add(wide[k], inverse, Lanes{} + ROUNDING);
        std::memcpy(bits + k * LANES, &rounded, WIDTH);
      }
      for (int k = 0; k < GROUP; k++) {
        total += bits[k] - 0x4b400000u;  // the bits of ROUNDING
        to[k] = int8_t(bits[k]);
      }
      group->scale = is_finite ? largest / 127 : NAN;
      group->start = SHIFTED ? int32_t(total * -128u) : 0;
    }
  }
};

// Write the sums of R rows with a panel of `in` numbers each, and ask the memory for the panel that is `next`.
template <int R>
void add_tile(const int8_t* x, int64_t stride, const int8_t* panel, const int8_t* next, int64_t in, Lanes* to) {
  constexpr int V = VECTORS, SPLIT = R * V < 4 ? 4 / (R * V) : 1;  // sums that do not wait for one another
  const Group* group[R];
  each<R>([&](auto r) UNROLLED {
    group[r] = reinterpret_cast<const Group*>(x + r * stride + (in + GROUP - 1) / GROUP * GROUP);
  });
  Lanes own[R * V];
  each<R * V>([&](auto i) UNROLLED { own[i] = Lanes{}; });
  for (int64_t k = 0; k < in;) {
    Whole sums[SPLIT * R * V];
    each<R * V>([&](auto i) UNROLLED { sums[i] = Whole{} + (SHIFTED ? group[i / V]->start : 0); });
    each<(SPLIT - 1) * R * V>([&](auto i) UNROLLED { sums[R * V + i] = Whole{}; });
    auto step = [&](auto split) UNROLLED {
      each<PANEL * DEPTH / LINE>([&](auto line) UNROLLED { __builtin_prefetch(next + k * PANEL + line * LINE, 0, 2); });
      each<V>([&](auto v) UNROLLED {
        const Left left(panel + k * PANEL + v * WIDTH);
        each<R>([&](auto r) UNROLLED {
          int32_t numbers;
          std::memcpy(&numbers, x + r * stride + k, DEPTH);
          Whole& sum = sums[(split * R + r) * V + v];
          sum = left.add(Whole{} + numbers, sum);
        });
      });
      k += DEPTH;
    };
    const int64_t end = std::min(k + GROUP, in);
    if constexpr (SPLIT > 1)
      while (k + SPLIT * DEPTH <= end) each<SPLIT>(step);
    while (k < end) step(std::integral_constant<int, 0>());
    each<R * V>([&](auto i) UNROLLED {
      each<SPLIT - 1>([&](auto split) UNROLLED { sums[i] += sums[(split + 1) * R * V + i]; });
      own[i] = multiply_add(__builtin_convertvector(sums[i], Lanes), group[i / V]->scale - Lanes{}, own[i]);
    });
    each<R>([&](auto r) UNROLLED { group[r]++; });
  }
  each<R * V>([&](auto i) UNROLLED { to[i] = own[i]; });
}

// Call one(R) with the constant R that is `rows`.
template <int R = MOST_ROWS, class One>
void with_rows(int64_t rows, const One& one) {
  if constexpr (R > 1)
    if (rows < R) return with_rows<R - 1>(rows, one);
  one(std::integral_constant<int, R>());
}

// A product of rows that are in int8 by then.
struct Int8Work : Work {
  using Number = Own::Number;
  const Product of;
  const Int8Rows x;
  const int64_t in = of.rows.size, panels = (of.out + PANEL - 1) / PANEL, size;  // panels of a part

  Int8Work(const Product& of, const Int8Rows& x, int64_t size)
      : Work((of.out + size * PANEL - 1) / (size * PANEL)), of(of), x(x), size(size) {}

  const int8_t* at(int64_t panel) const { return static_cast<const int8_t*>(of.weight) + panel * PANEL * in; }

  void run(int64_t part) const override {
    const int64_t first = part * size, last = std::min(first + size, panels);
    const int64_t block = std::max<int64_t>(MOST_ROWS, BLOCK_BYTES / x.stride / MOST_ROWS * MOST_ROWS);
    for (int64_t row = 0; row < of.rows.count; row += block)
      for (int64_t panel = first; panel < last; panel++) {
        const int64_t next = panel + 1 < panels ? panel + 1 : panel;
        outputs(row, std::min(block, of.rows.count - row), panel, at(next));
      }
  }

  // Write the outputs of a panel.
  void outputs(int64_t first, int64_t rows, int64_t panel, const int8_t* next) const {
    const int64_t count = std::min<int64_t>(PANEL, of.out - panel * PANEL);
    const int8_t* weight = count < PANEL ? filled(at(panel), count) : at(panel);
    for (int64_t tiles = (rows + MOST_ROWS - 1) / MOST_ROWS; tiles; tiles--) {  // of about as many rows each
      const int64_t own = (rows + tiles - 1) / tiles;
      with_rows(own, [&](auto tile_rows) {
        constexpr int R = tile_rows;
        Lanes sums[R * VECTORS];
        add_tile<R>(x.row(first), x.stride, weight, tiles == 1 ? next : weight, in, sums);
        for (int r = 0; r < R; r++) write(first + r, panel * PANEL, count, sums + r * VECTORS);
      });
      first += own;
      rows -= own;
    }
  }

  // Return a panel of few rows with zeros for the others.
  const int8_t* filled(const int8_t* weight, int64_t count) const {
    struct Panel;
    int8_t* to = reinterpret_cast<int8_t*>(scratch<Panel>(in * PANEL / WIDTH));
    std::memset(to, 0, in * PANEL);
    for (int64_t k = 0; k < in; k += DEPTH) std::memcpy(to + k * PANEL, weight + k * count, count * DEPTH);
    return to;
  }

  static Lanes widened(const Number* numbers) {
    Lanes wide;
    widen(numbers, LANES, &wide);
    return wide;
  }

  // Write `count` outputs of a row from output `at` on.
  void write(int64_t row, int64_t at, int64_t count, const Lanes* sums) const {
    const Number *bias = static_cast<const Number*>(of.bias), *plus = static_cast<const Number*>(of.plus);
    for (int64_t i = 0; i < count; i += LANES) {
      const int64_t from = at + i, own = std::min<int64_t>(LANES, count - i);
      auto wide = [own](const Number* numbers) {  // a mapped file may have them at any place
        Number copy[LANES] = {};
        if (own == LANES) std::memcpy(copy, numbers, sizeof copy);
        else std::memcpy(copy, numbers, own * sizeof copy[0]);
        return widened(copy);
      };
      Lanes scales = {};
      if (own == LANES) std::memcpy(&scales, of.scales + from, WIDTH);
      else std::memcpy(&scales, of.scales + from, own * sizeof scales[0]);
      Lanes result = multiply_add(*sums++, scales, bias ? wide(bias + from) : Lanes{});
      Number numbers[LANES];
      Own::store(result, numbers);
      if (plus) {
        Own::store(widened(numbers) + wide(plus + row * of.out + from), numbers);
      }
      auto put = [&](void* to, int64_t place) {
        if (own == LANES) std::memcpy(static_cast<Number*>(to) + place, numbers, sizeof numbers);
        else std::memcpy(static_cast<Number*>(to) + place, numbers, own * sizeof numbers[0]);
      };
      put(of.y, row * of.out + from);
      if (of.also) put(of.also, row * of.also_stride + from);
    }
  }
};

Tensor pack_int8(const Tensor& weight) {
  STD_TORCH_CHECK(weight.scalar_type() == ScalarType::Char && weight.is_contiguous() && weight.dim() == 2 &&
                      weight.size(1) % DEPTH == 0,
                  "pack_int8 takes a contiguous weight [out, in] in int8, whose rows have a multiple of 4 numbers");
  const int64_t out = weight.size(0), in = weight.size(1);
  Tensor packed = torch::stable::new_empty(weight, {out, in});
  const int8_t* from = static_cast<const int8_t*>(weight.data_ptr());
  int8_t* to = static_cast<int8_t*>(packed.data_ptr());
  auto one = [=](int64_t panel) {
    const int64_t first = panel * PANEL, count = std::min<int64_t>(PANEL, out - first);
    int8_t* own = to + first * in;
    for (int64_t k = 0; k < in; k += DEPTH)
      for (int64_t row = first; row < first + count; row++, own += DEPTH) {
        std::memcpy(own, from + row * in + k, DEPTH);
        for (int i = 0; SHIFTED && i < DEPTH; i++) own[i] ^= -128;
      }
  };
  Works works;
  works.push_back(std::make_unique<Function>((out + PANEL - 1) / PANEL, one));
  team().run(works, threads_for(out * in));
  return packed;
}

Tensor linear_int8(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(x.scalar_type() == Own::TYPE && x.is_contiguous() && x.dim() == 2 && x.size(1) > 0 &&
                      x.size(1) % DEPTH == 0 && weight.scalar_type() == ScalarType::Char && weight.is_contiguous() &&
                      weight.dim() == 2 && weight.size(1) == x.size(1) && scales.is_contiguous() &&
                      scales.scalar_type() == ScalarType::Float && scales.numel() == weight.size(0) &&
                      (!bias.has_value() || bias->scalar_type() == x.scalar_type()),
                  "linear_int8 takes contiguous x [T, in], weight [out, in] of pack_int8 and scales [out] in float32");
  const int64_t rows = x.size(0), in = x.size(1), out = weight.size(0), threads = threads_for(rows * in * out);
  Tensor y = torch::stable::new_empty(x, {rows, out});
  Works works;
  const void* added = bias.has_value() ? bias->data_ptr() : nullptr;
  const float* factors = static_cast<const float*>(scales.data_ptr());
  add_int8_product(works, {{x.data_ptr(), rows, in, in}, out, weight.data_ptr(), added, y.data_ptr(), factors}, threads);
  team().run(works, threads);
  return y;
}

}  // namespace

namespace OPERATORS {

void add_int8_product(Works& works, const Product& of, int64_t threads) {
  const Int8Rows x(of.rows);
  const int64_t size = std::clamp<int64_t>(of.out / (8 * PANEL * threads), 1, 16);
  works.push_back(std::make_unique<Function>(of.rows.count, [x](int64_t row) { x.round(row); }));
  works.push_back(std::make_unique<Int8Work>(of, x, size));
}

}  // namespace OPERATORS

STABLE_TORCH_LIBRARY_FRAGMENT(OPERATORS, library) {
  library.def("pack_int8(Tensor weight) -> Tensor");
  library.def("linear_int8(Tensor x, Tensor weight, Tensor scales, Tensor? bias) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(OPERATORS, CPU, library) {
  library.impl("pack_int8", TORCH_BOX(&pack_int8));
  library.impl("linear_int8", TORCH_BOX(&linear_int8));
}
