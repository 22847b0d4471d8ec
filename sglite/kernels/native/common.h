// Shared small things: sizes, bf16, an exponential. Everything assumes AVX-512 (F, BW, DQ, VL, VNNI).
#pragma once

#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace sglite {

constexpr int kLanes = 16;   // fp32 in a vector; columns of a weight panel; positions of a key/value block
constexpr int kGroup = 32;   // weights or activations that share a scale
constexpr int kTileRows = 16;

using bf16 = uint16_t;

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
inline int round_up(int a, int b) { return ceil_div(a, b) * b; }
inline __mmask16 first_lanes(int n) { return n >= kLanes ? 0xFFFF : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1); }

// Memory that grows when asked and is never copied: its old content is lost. Large ones lie on large pages, where the
// system has them.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  T* reserve(size_t count) {
    if (count > capacity_) {
      std::free(data_);
      capacity_ = count + count / 4;
      const size_t page = capacity_ * sizeof(T) >= kHugePage / 4 ? kHugePage : 4096;
      const size_t bytes = (capacity_ * sizeof(T) + page - 1) / page * page;
      data_ = static_cast<T*>(std::aligned_alloc(page, bytes));
      if (data_ == nullptr) std::abort();
      if (page == kHugePage) madvise(data_, bytes, MADV_HUGEPAGE);
      std::memset(static_cast<void*>(data_), 0, bytes);
    }
    return data_;
  }
  T* get() const { return data_; }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;

  T* data_ = nullptr;
  size_t capacity_ = 0;
};

// ------------------------------------------------------------------------------------------------------------- bf16

inline __m512 widen(__m256i values) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16)); }
inline __m512 load_bf16(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

inline __m256i narrow(__m512 x) {  // round to nearest even
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
inline void store_bf16(bf16* p, __m512 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }

// sum + a.even * b.even + a.odd * b.odd on pairs of bf16
inline __m512 dot_bf16(__m512 sum, __m512i a, __m512i b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
  sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), sum);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)), sum);
#endif
}

// ------------------------------------------------------------------------------------------------------- reductions

struct Larger {
  __m512 operator()(__m512 a, __m512 b) const { return _mm512_max_ps(a, b); }
};
struct Sum {
  __m512 operator()(__m512 a, __m512 b) const { return _mm512_add_ps(a, b); }
};

// Reduces each of 16 vectors to one lane of the result, in a fixed order: half the work of 16 single reductions.
template <class Op>
inline __m512 reduce_rows(const float (*rows)[kLanes], const Op& op) {
  __m512 eight[8], four[4], two[2];
  const auto row = [rows](int i) { return _mm512_load_ps(rows[i]); };
  const auto as_pd = [](__m512 x) { return _mm512_castps_pd(x); };
  const auto as_ps = [](__m512d x) { return _mm512_castpd_ps(x); };
  for (int i = 0; i < 8; ++i) {
    eight[i] = op(_mm512_unpacklo_ps(row(2 * i), row(2 * i + 1)), _mm512_unpackhi_ps(row(2 * i), row(2 * i + 1)));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d a = as_pd(eight[2 * i]), b = as_pd(eight[2 * i + 1]);
    four[i] = op(as_ps(_mm512_unpacklo_pd(a, b)), as_ps(_mm512_unpackhi_pd(a, b)));
  }
  for (int i = 0; i < 2; ++i) {
    const __m512 a = four[2 * i], b = four[2 * i + 1];
    two[i] = op(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  }
  return op(_mm512_shuffle_f32x4(two[0], two[1], 0x88), _mm512_shuffle_f32x4(two[0], two[1], 0xDD));
}

// ------------------------------------------------------------------------------------------------------ exponentials

// 2^x by a polynomial in the fraction, least squares on [-1/2, 1/2]; exactly 1 at 0, 0 far below -126. x is finite.
// Relative error 1e-7 with five terms, 1e-4 with three, which is enough where bf16 follows.
template <int Terms>
inline __m512 exp2_ps(__m512 x) {
  static_assert(Terms == 3 || Terms == 5);
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, whole);
  __m512 y;
  if constexpr (Terms == 5) {
    y = _mm512_fmadd_ps(_mm512_set1_ps(0.00132377563f), f, _mm512_set1_ps(0.00967166364f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.0555082664f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.240222388f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.693146907f));
  } else {
    y = _mm512_fmadd_ps(_mm512_set1_ps(0.0550089367f), f, _mm512_set1_ps(0.242210969f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.693282902f));
  }
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, whole);
}

constexpr float kLog2e = 1.44269504f;
inline __m512 exp_ps(__m512 x) { return exp2_ps<5>(_mm512_mul_ps(x, _mm512_set1_ps(kLog2e))); }

inline __m512 silu(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 low = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));  // so that exp stays finite
  const __m512 below = _mm512_add_ps(one, exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), low)));
  const __m512 guess = _mm512_rcp14_ps(below);  // one step of Newton's method is cheaper than a division
  const __m512 rest = _mm512_fnmadd_ps(below, guess, one);
  return _mm512_mul_ps(x, _mm512_fmadd_ps(guess, rest, guess));
}

}  // namespace sglite
