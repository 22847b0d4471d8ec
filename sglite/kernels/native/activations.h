// The left operand of a product: rows of fp32 encoded the way a matrix wants to meet them.
//
//   kBf16    rounded to bf16, in tiles [row / 16][k / 32][16][32]
//   kInt16   one scale per row and 16-bit integers, split into a high and a low signed byte:
//            x = scale * (256 * high + low), in tiles [row / 16][k / 64][high, low][16][64]
//   kInt16U  the same with 128 added to each byte, for VNNI's unsigned operand
//   kInt8    one scale per 32 columns and signed bytes, row by row
//
// Every row is encoded by itself, so its bits never depend on the rows beside it.
#pragma once

#include "common.h"

namespace sglite {

enum class Coding { kBf16, kInt16, kInt16U, kInt8 };

class Activations {
 public:
  // columns: padded to the coding's unit (32 for kBf16 and kInt8, 64 for kInt16).
  void shape(Coding coding, int rows, int columns) {
    coding_ = coding;
    columns_ = columns;
    const size_t padded = round_up(rows, kTileRows);
    data_.reserve(padded * columns * (coding == Coding::kInt8 ? 1 : 2));
    const int groups = coding == Coding::kInt8 ? columns / kGroup : 1;
    groups_ = groups;
    scales_.reserve(padded * groups);
    if (coding == Coding::kInt8) {
      sums_.reserve(padded * groups);
    }
  }

  // x: `columns` floats, zero where they are padding.
  void encode(int row, const float* x) {
    switch (coding_) {
      case Coding::kBf16: return encode_bf16(row, x);
      case Coding::kInt16: return encode_int16(row, x, 0);
      case Coding::kInt16U: return encode_int16(row, x, 0x80);
      case Coding::kInt8: return encode_int8(row, x);
    }
  }

  Coding coding() const { return coding_; }
  int columns() const { return columns_; }
  float scale(int row) const { return scales_.get()[row]; }
  const float* scales(int row) const { return scales_.get() + static_cast<size_t>(row) * groups_; }
  const float* sums(int row) const { return sums_.get() + static_cast<size_t>(row) * groups_; }  // scale * sum of codes

  // The tile rows of `row` in the tiled codings: row stride 64 bytes, next 32 bf16 or byte plane after 1024 bytes.
  const uint8_t* tile_row(int row) const { return data_.get() + tile_offset(row); }
  const int8_t* code_row(int row) const {
    return reinterpret_cast<const int8_t*>(data_.get()) + static_cast<size_t>(row) * columns_;
  }

 private:
  static constexpr size_t kTileBytes = 1024;

  size_t tile_offset(int row) const {
    return static_cast<size_t>(row / kTileRows) * kTileRows * columns_ * 2 + (row % kTileRows) * 64;
  }

  void encode_bf16(int row, const float* x) {
    uint8_t* to = data_.get() + tile_offset(row);
    for (int k = 0; k < columns_; k += 32, to += kTileBytes) {
      store_bf16(reinterpret_cast<bf16*>(to), _mm512_loadu_ps(x + k));
      store_bf16(reinterpret_cast<bf16*>(to) + 16, _mm512_loadu_ps(x + k + 16));
    }
  }

  void encode_int16(int row, const float* x, int flip) {
    constexpr float kLargest = 127 * 256;
    const float peak = largest(x, columns_);
    scales_.get()[row] = peak / kLargest;
    const __m512 inverse = _mm512_set1_ps(peak > 0 ? kLargest / peak : 0.0f);
    const __m512i half = _mm512_set1_epi32(128);
    const __m128i flips = _mm_set1_epi8(static_cast<char>(flip));
    uint8_t* to = data_.get() + tile_offset(row);
    for (int k = 0; k < columns_; k += 64, to += 2 * kTileBytes) {
      for (int part = 0; part < 64; part += kLanes) {
        const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k + part), inverse));
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(code, half), 8);  // what is left fits -128 .. 127
        _mm_storeu_si128((__m128i*)(to + part), _mm_xor_si128(_mm512_cvtepi32_epi8(high), flips));
        _mm_storeu_si128((__m128i*)(to + kTileBytes + part), _mm_xor_si128(_mm512_cvtepi32_epi8(code), flips));
      }
    }
  }

  void encode_int8(int row, const float* x) {
    int8_t* to = reinterpret_cast<int8_t*>(data_.get()) + static_cast<size_t>(row) * columns_;
    float* scale = scales_.get() + static_cast<size_t>(row) * groups_;
    float* sum = sums_.get() + static_cast<size_t>(row) * groups_;
    for (int g = 0; g < groups_; ++g, x += kGroup, to += kGroup) {
      const float peak = largest(x, kGroup);
      const __m512 inverse = _mm512_set1_ps(peak > 0 ? 127.0f / peak : 0.0f);
      const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), inverse));
      const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + kLanes), inverse));
      _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(first));
      _mm_storeu_si128((__m128i*)(to + kLanes), _mm512_cvtepi32_epi8(second));
      scale[g] = peak / 127.0f;
      sum[g] = scale[g] * static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(first, second)));
    }
  }

  // The largest magnitude; NaN where a value is not finite, so that bad numbers stay visible behind integer codes.
  static float largest(const float* x, int count) {
    __m512 peak = _mm512_setzero_ps(), taint = _mm512_setzero_ps();
    for (int k = 0; k < count; k += kLanes) {
      const __m512 value = _mm512_loadu_ps(x + k);
      peak = _mm512_max_ps(peak, _mm512_abs_ps(value));
      taint = _mm512_fmadd_ps(value, _mm512_setzero_ps(), taint);
    }
    return _mm512_reduce_max_ps(peak) + _mm512_reduce_add_ps(taint);
  }

  Coding coding_ = Coding::kBf16;
  int columns_ = 0, groups_ = 1;
  Buffer<uint8_t> data_;
  Buffer<float> scales_, sums_;
};

}  // namespace sglite
