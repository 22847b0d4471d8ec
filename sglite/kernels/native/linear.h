// Products y = x W^T. The unit of work is two panels of the weight times up to 32 rows of x.
//
// With AMX, int8 weights meet 16-bit activations as two exact integer products; without it they meet 8-bit
// activations in groups of 32 (grouped.h). Either way a row's result is the same bits whatever rows and however many
// are computed with it.
#pragma once

#include "grouped.h"
#include "tiles.h"

namespace sglite {

constexpr int kBlockRows = 256;  // rows that go through a layer's products together, so that they stay in the L2 cache
constexpr int kUnitRows = 32;
constexpr int kVectorRows = 3;  // up to here the exact int8 product is done without tiles, bit for bit the same

// [panel a or b][row][n]
struct Unit {
  alignas(64) float y[2][kUnitRows][kLanes];
};

inline Coding coding_for(const Matrix& w, int rows, bool amx) {
  if (w.format == kDense) return Coding::kBf16;
  if (w.format == kInt4 || !amx) return Coding::kInt8;
  return rows <= kVectorRows ? Coding::kInt16U : Coding::kInt16;
}

// --------------------------------------------------------------------------------------------------- bf16, no tiles

template <int R>
void dense_rows(const Matrix& w, const Activations& x, int row, int a, int b, float (*ya)[kLanes], float (*yb)[kLanes]) {
  const size_t panel_bytes = static_cast<size_t>(w.padded_columns) * kLanes * 2;
  const uint8_t *wa = w.codes + a * panel_bytes, *wb = w.codes + b * panel_bytes;
  const uint8_t* from[R];
  __m512 sum_a[R], sum_b[R];
  for (int r = 0; r < R; ++r) {
    from[r] = x.tile_row(row + r);
    sum_a[r] = sum_b[r] = _mm512_setzero_ps();
  }
  for (int k = 0; k < w.padded_columns; k += 32) {
    for (int pair = 0; pair < 16; ++pair, wa += 64, wb += 64) {
      const __m512i va = _mm512_loadu_si512(wa), vb = _mm512_loadu_si512(wb);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        int both;
        std::memcpy(&both, from[r] + pair * 4, 4);
        const __m512i xs = _mm512_set1_epi32(both);
        sum_a[r] = dot_bf16(sum_a[r], va, xs);
        sum_b[r] = dot_bf16(sum_b[r], vb, xs);
      }
    }
    for (int r = 0; r < R; ++r) from[r] += 1024;
  }
  for (int r = 0; r < R; ++r) {
    _mm512_store_ps(ya[r], sum_a[r]);
    _mm512_store_ps(yb[r], sum_b[r]);
  }
}

// ------------------------------------------------------------------------------------ int8 weights, 16-bit activations

inline __m512 exact_value(__m512i high, __m512i low, __m512 weight_scale, float row_scale) {
  const __m512 whole = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(low));
  return _mm512_mul_ps(whole, _mm512_mul_ps(weight_scale, _mm512_set1_ps(row_scale)));
}

template <int R>
void exact_rows(const Matrix& w, const Activations& x, int row, int a, int b, float (*ya)[kLanes], float (*yb)[kLanes]) {
  const size_t panel_bytes = static_cast<size_t>(w.padded_columns) * kLanes;
  const uint8_t *wa = w.codes + a * panel_bytes, *wb = w.codes + b * panel_bytes;
  const float* scale = static_cast<const float*>(w.scale);
  // each byte of x carries 128 too much: take 128 * (sum of the weight's row) away
  const __m512i extra_a = _mm512_slli_epi32(_mm512_loadu_si512(w.sums + a * kLanes), 7);
  const __m512i extra_b = _mm512_slli_epi32(_mm512_loadu_si512(w.sums + b * kLanes), 7);
  const uint8_t* from[R];
  __m512i high_a[R], low_a[R], high_b[R], low_b[R];
  for (int r = 0; r < R; ++r) {
    from[r] = x.tile_row(row + r);
    high_a[r] = low_a[r] = _mm512_sub_epi32(_mm512_setzero_si512(), extra_a);
    high_b[r] = low_b[r] = _mm512_sub_epi32(_mm512_setzero_si512(), extra_b);
  }
  for (int k = 0; k < w.padded_columns; k += 64) {
#pragma GCC unroll 4
    for (int quad = 0; quad < 16; ++quad, wa += 64, wb += 64) {
      const __m512i va = _mm512_loadu_si512(wa), vb = _mm512_loadu_si512(wb);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        int high, low;
        std::memcpy(&high, from[r] + quad * 4, 4);
        std::memcpy(&low, from[r] + 1024 + quad * 4, 4);
        const __m512i xh = _mm512_set1_epi32(high), xl = _mm512_set1_epi32(low);
        high_a[r] = _mm512_dpbusd_epi32(high_a[r], xh, va);
        low_a[r] = _mm512_dpbusd_epi32(low_a[r], xl, va);
        high_b[r] = _mm512_dpbusd_epi32(high_b[r], xh, vb);
        low_b[r] = _mm512_dpbusd_epi32(low_b[r], xl, vb);
      }
    }
    for (int r = 0; r < R; ++r) from[r] += 2048;
  }
  for (int r = 0; r < R; ++r) {
    const __m512 scale_a = _mm512_loadu_ps(scale + a * kLanes), scale_b = _mm512_loadu_ps(scale + b * kLanes);
    _mm512_store_ps(ya[r], exact_value(high_a[r], low_a[r], scale_a, x.scale(row + r)));
    _mm512_store_ps(yb[r], exact_value(high_b[r], low_b[r], scale_b, x.scale(row + r)));
  }
}

// ----------------------------------------------------------------------------------------------------------- dispatch

inline void dense_unit(const Matrix& w, const Activations& x, int row, int rows, int a, int b, Unit& unit) {
  int done = 0;
  for (; rows - done >= 6; done += 6) dense_rows<6>(w, x, row + done, a, b, unit.y[0] + done, unit.y[1] + done);
  for (; rows - done >= 2; done += 2) dense_rows<2>(w, x, row + done, a, b, unit.y[0] + done, unit.y[1] + done);
  for (; done < rows; ++done) dense_rows<1>(w, x, row + done, a, b, unit.y[0] + done, unit.y[1] + done);
}

inline void exact_unit(const Matrix& w, const Activations& x, int row, int rows, int a, int b, Unit& unit) {
  switch (rows) {
    case 1: return exact_rows<1>(w, x, row, a, b, unit.y[0], unit.y[1]);
    case 2: return exact_rows<2>(w, x, row, a, b, unit.y[0], unit.y[1]);
    default: return exact_rows<3>(w, x, row, a, b, unit.y[0], unit.y[1]);
  }
}

// Rows [row, row + rows) times panels a and b, without tiles; rows at most 32. sink(row, a, b, ya, yb) takes each row's
// 16 results of either panel.
template <class Sink>
void product(const Matrix& w, const Activations& x, int row, int rows, int a, int b, Unit& unit, const Sink& sink) {
  if (x.coding() == Coding::kInt16U) exact_unit(w, x, row, rows, a, b, unit);
  if (x.coding() == Coding::kBf16) dense_unit(w, x, row, rows, a, b, unit);
  if (x.coding() == Coding::kInt8) {
    const auto grouped = w.format == kInt8 ? grouped_unit<kInt8> : grouped_unit<kInt4>;
    grouped(w, x, row, rows, a, b, unit.y[0], unit.y[1]);
  }
  for (int r = 0; r < rows; ++r) sink(row + r, a, b, _mm512_load_ps(unit.y[0][r]), _mm512_load_ps(unit.y[1][r]));
}

}  // namespace sglite
