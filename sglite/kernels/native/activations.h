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

// What goes with a group's codes: their scale, the scaled sum of the codes, and where an integer sum starts that meets
// codes of weights with 128 too much each.
struct GroupFactors {
  float scale, sum;
  int32_t start;
};

enum class Coding { kBf16, kInt16, kInt16U, kInt8 };

class Activations {
 public:
  // columns: padded to the coding's unit (32 for kBf16 and kInt8, 64 for kInt16).
  void shape(Coding coding, int rows, int columns) {
    coding_ = coding;
    columns_ = columns;
    const size_t padded = round_up(rows, kTileRows);
    data_.reserve(padded * columns * (coding == Coding::kInt8 ? 1 : 2));
    if (coding == Coding::kInt8) {
      groups_ = columns / kGroup;
      factors_.reserve(padded * groups_);
    } else {
      scales_.reserve(padded);
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
  const GroupFactors* factors(int row) const { return factors_.get() + static_cast<size_t>(row) * groups_; }

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
    const __m512i half = _mm512_set1_epi16(128), flips = _mm512_set1_epi8(static_cast<char>(flip));
    // packing works within lanes of 16 bytes; this puts their words of 4 bytes into order
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const auto code = [&](const float* from) { return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(from), inverse)); };
    uint8_t* to = data_.get() + tile_offset(row);
    for (int k = 0; k < columns_; k += 64, to += 2 * kTileBytes) {
      const __m512i first = _mm512_packs_epi32(code(x + k), code(x + k + 16));
      const __m512i second = _mm512_packs_epi32(code(x + k + 32), code(x + k + 48));
      const auto high = [half](__m512i codes) { return _mm512_srai_epi16(_mm512_add_epi16(codes, half), 8); };
      const auto low = [](__m512i codes) { return _mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 8); };  // -128 .. 127
      const auto put = [&](uint8_t* at, __m512i bytes) {
        _mm512_storeu_si512(at, _mm512_xor_si512(_mm512_permutexvar_epi32(order, bytes), flips));
      };
      put(to, _mm512_packs_epi16(high(first), high(second)));
      put(to + kTileBytes, _mm512_packs_epi16(low(first), low(second)));
    }
  }

  void encode_int8(int row, const float* x) {
    int8_t* to = reinterpret_cast<int8_t*>(data_.get()) + static_cast<size_t>(row) * columns_;
    GroupFactors* factors = factors_.get() + static_cast<size_t>(row) * groups_;
    for (int g = 0; g < groups_; ++g, x += kGroup, to += kGroup) {
      const float peak = largest(x, kGroup), scale = peak / 127.0f;
      const __m512 inverse = _mm512_set1_ps(peak > 0 ? 127.0f / peak : 0.0f);
      const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), inverse));
      const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + kLanes), inverse));
      _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(first));
      _mm_storeu_si128((__m128i*)(to + kLanes), _mm512_cvtepi32_epi8(second));
      const int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
      factors[g] = {scale, scale * static_cast<float>(sum), -128 * sum};
    }
  }

  // The largest magnitude; NaN where a value is not finite, so that bad numbers stay visible behind integer codes. As
  // integers, the bits of magnitudes are in order, and those of what is not finite come last.
  static float largest(const float* x, int count) {
    const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
    __m512i peak = _mm512_setzero_si512();
    for (int k = 0; k < count; k += kLanes) peak = _mm512_max_epu32(peak, _mm512_and_si512(_mm512_loadu_si512(x + k), magnitude));
    const uint32_t bits = _mm512_reduce_max_epu32(peak);
    float value;
    std::memcpy(&value, &bits, 4);
    return value + (value - value);  // infinite: NaN
  }

  Coding coding_ = Coding::kBf16;
  int columns_ = 0, groups_ = 0;
  Buffer<uint8_t> data_;
  Buffer<float> scales_;
  Buffer<GroupFactors> factors_;
};

}  // namespace sglite
