// What happens to single rows between the products: norm, RoPE, embedding.
#pragma once

#include "linear.h"

namespace sglite {

// to = x / sqrt(mean(x^2) + eps) * weight; `to` may be x.
inline void rms_norm(const float* x, const float* weight, float eps, int count, float* to) {
  __m512 sum = _mm512_setzero_ps();
  for (int i = 0; i < count; i += kLanes) {
    const __m512 value = _mm512_maskz_loadu_ps(first_lanes(count - i), x + i);
    sum = _mm512_fmadd_ps(value, value, sum);
  }
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / count + eps));
  for (int i = 0; i < count; i += kLanes) {
    const __mmask16 lanes = first_lanes(count - i);
    const __m512 value = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, x + i), scale);
    _mm512_mask_storeu_ps(to + i, lanes, _mm512_mul_ps(value, _mm512_maskz_loadu_ps(lanes, weight + i)));
  }
}

// One head: component i turns with i + dim / 2. Result in bf16.
inline void rotate(const float* x, const float* cos, const float* sin, int dim, bf16* to) {
  const int half = dim / 2;
  for (int i = 0; i < half; i += kLanes) {
    const __mmask16 lanes = first_lanes(half - i);
    const __m512 first = _mm512_maskz_loadu_ps(lanes, x + i), second = _mm512_maskz_loadu_ps(lanes, x + half + i);
    const __m512 c = _mm512_maskz_loadu_ps(lanes, cos + i), s = _mm512_maskz_loadu_ps(lanes, sin + i);
    const __m512 a = _mm512_sub_ps(_mm512_mul_ps(first, c), _mm512_mul_ps(second, s));
    const __m512 b = _mm512_add_ps(_mm512_mul_ps(second, c), _mm512_mul_ps(first, s));
    _mm256_mask_storeu_epi16(to + i, lanes, narrow(a));
    _mm256_mask_storeu_epi16(to + half + i, lanes, narrow(b));
  }
}

inline void to_bf16(const float* x, int count, bf16* to) {
  for (int i = 0; i < count; i += kLanes) {
    const __mmask16 lanes = first_lanes(count - i);
    _mm256_mask_storeu_epi16(to + i, lanes, narrow(_mm512_maskz_loadu_ps(lanes, x + i)));
  }
}

inline void from_bf16(const bf16* x, int count, float* to) {
  for (int i = 0; i < count; i += kLanes) {
    const __mmask16 lanes = first_lanes(count - i);
    _mm512_mask_storeu_ps(to + i, lanes, widen(_mm256_maskz_loadu_epi16(lanes, x + i)));
  }
}

// Row `index` of a packed matrix as numbers.
inline void unpack_row(const Matrix& w, int64_t index, float* to) {
  const int panel = static_cast<int>(index / kLanes), n = static_cast<int>(index % kLanes);
  const size_t start = static_cast<size_t>(panel) * w.padded_columns;
  if (w.format == kDense) {
    const bf16* codes = reinterpret_cast<const bf16*>(w.codes) + start * kLanes + n * 2;
    for (int k = 0; k < w.columns; ++k) {
      const uint32_t bits = static_cast<uint32_t>(codes[(k / 2) * 2 * kLanes + k % 2]) << 16;
      std::memcpy(to + k, &bits, 4);
    }
  } else if (w.format == kInt8) {
    const int8_t* codes = reinterpret_cast<const int8_t*>(w.codes) + start * kLanes + n * 4;
    const float scale = static_cast<const float*>(w.scale)[index];
    for (int k = 0; k < w.columns; ++k) to[k] = scale * codes[(k / 4) * 4 * kLanes + k % 4];
  } else {
    const int groups = w.padded_columns / kGroup;
    for (int k = 0; k < w.columns; ++k) {
      const size_t group = static_cast<size_t>(panel) * groups + k / kGroup;
      const int quad = k % kGroup / 4;
      const uint8_t byte = w.codes[group * 256 + (quad % 4) * 64 + n * 4 + k % 4];
      const float scale = _cvtsh_ss(static_cast<const uint16_t*>(w.scale)[group * kLanes + n]);
      to[k] = scale * (quad < 4 ? byte & 15 : byte >> 4) + _cvtsh_ss(w.minimum[group * kLanes + n]);
    }
  }
}

}  // namespace sglite
