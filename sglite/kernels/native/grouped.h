// Products of integer weights with 8-bit activations in groups of 32 columns: what CPUs without tiles do for int8, and
// every CPU for 4-bit blocks.
//
// The integer sum of a group is exact; the groups' sums are scaled and added in their order, so a row's result is the
// same bits in any batch.
#pragma once

#include "matrix.h"

namespace sglite {

constexpr int kGroupVectors = kGroup / 4;  // a vector has 4 columns of 16 rows of the weight

inline __m512 half_floats(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

// One panel of a weight: its codes as VNNI wants them, unsigned, and what its sums are scaled by.
template <Format F>
class GroupedPanel {
 public:
  GroupedPanel(const Matrix& w, int panel)
      : codes_(w.codes + static_cast<size_t>(panel) * w.padded_columns * kLanes / (F == kInt8 ? 1 : 2)),
        scale_(static_cast<const uint8_t*>(w.scale) + static_cast<size_t>(panel) * kLanes * (F == kInt8 ? 4 : 2 * w.groups())),
        minimum_(w.minimum + (F == kInt8 ? 0 : static_cast<size_t>(panel) * w.groups() * kLanes)) {}

  // Columns 4 i to 4 i + 3 of a group. Signed codes become unsigned by 128 more, which the sums' start makes up for.
  __m512i codes(int group, int i) const {
    if constexpr (F == kInt8) {
      const __m512i bytes = _mm512_loadu_si512(codes_ + (group * kGroupVectors + i) * 64);
      return _mm512_xor_si512(bytes, _mm512_set1_epi8(static_cast<char>(0x80)));
    } else {
      const __m512i bytes = _mm512_loadu_si512(codes_ + (group * kGroupVectors / 2 + i % 4) * 64);
      return _mm512_and_si512(i < 4 ? bytes : _mm512_srli_epi16(bytes, 4), _mm512_set1_epi8(0x0F));
    }
  }

  // total + what the group adds. `scale` and `sum` are the activations': their scale, and the scaled sum of their codes.
  __m512 add(__m512 total, int group, __m512i dot, float scale, float sum) const {
    const __m512 value = _mm512_cvtepi32_ps(dot);
    if constexpr (F == kInt8) return _mm512_fmadd_ps(value, _mm512_set1_ps(scale), total);
    const __m512 own = half_floats(reinterpret_cast<const uint16_t*>(scale_) + group * kLanes);
    total = _mm512_fmadd_ps(half_floats(minimum_ + group * kLanes), _mm512_set1_ps(sum), total);
    return _mm512_fmadd_ps(_mm512_mul_ps(value, _mm512_set1_ps(scale)), own, total);
  }

  // For int8 there is one scale for each row of the weight, left for the end.
  __m512 finish(__m512 total) const {
    return F == kInt8 ? _mm512_mul_ps(total, _mm512_loadu_ps(scale_)) : total;
  }

 private:
  const uint8_t *codes_, *scale_;
  const uint16_t* minimum_;
};

// R rows times two panels: 2 R sums at a time, so that no product waits for the one before.
template <Format F, int R>
void grouped_rows(const Matrix& w, const Activations& x, int row, int a, int b, float (*ya)[kLanes], float (*yb)[kLanes]) {
  const GroupedPanel<F> panel_a(w, a), panel_b(w, b);
  const int groups = w.groups();
  const size_t columns = x.columns();
  const int8_t* from = x.code_row(row);
  const GroupFactors* factors = x.factors(row);
  __m512 total_a[R], total_b[R];
  for (int r = 0; r < R; ++r) total_a[r] = total_b[r] = _mm512_setzero_ps();
  for (int g = 0; g < groups; ++g, from += kGroup, ++factors) {
    __m512i dot_a[R], dot_b[R];
    for (int r = 0; r < R; ++r) {
      dot_a[r] = dot_b[r] = F == kInt8 ? _mm512_set1_epi32(factors[r * groups].start) : _mm512_setzero_si512();
    }
#pragma GCC unroll 8
    for (int i = 0; i < kGroupVectors; ++i) {
      const __m512i ca = panel_a.codes(g, i), cb = panel_b.codes(g, i);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        int four;
        std::memcpy(&four, from + r * columns + i * 4, sizeof(four));
        const __m512i xs = _mm512_set1_epi32(four);
        dot_a[r] = _mm512_dpbusd_epi32(dot_a[r], ca, xs);
        dot_b[r] = _mm512_dpbusd_epi32(dot_b[r], cb, xs);
      }
    }
    for (int r = 0; r < R; ++r) {
      const GroupFactors& f = factors[r * groups];
      total_a[r] = panel_a.add(total_a[r], g, dot_a[r], f.scale, f.sum);
      total_b[r] = panel_b.add(total_b[r], g, dot_b[r], f.scale, f.sum);
    }
  }
  for (int r = 0; r < R; ++r) {
    _mm512_store_ps(ya[r], panel_a.finish(total_a[r]));
    _mm512_store_ps(yb[r], panel_b.finish(total_b[r]));
  }
}

template <Format F>
void grouped_unit(const Matrix& w, const Activations& x, int row, int rows, int a, int b, float (*ya)[kLanes], float (*yb)[kLanes]) {
  int done = 0;
  for (; rows - done >= 8; done += 8) grouped_rows<F, 8>(w, x, row + done, a, b, ya + done, yb + done);
  for (; rows - done >= 4; done += 4) grouped_rows<F, 4>(w, x, row + done, a, b, ya + done, yb + done);
  for (; rows - done >= 2; done += 2) grouped_rows<F, 2>(w, x, row + done, a, b, ya + done, yb + done);
  for (; done < rows; ++done) grouped_rows<F, 1>(w, x, row + done, a, b, ya + done, yb + done);
}

}  // namespace sglite
