// What a sampler asks of every step: the likeliest allowed token, and the log-probability of a token.
#pragma once

#include "common.h"

namespace sglite {

struct Best {
  float value;
  int32_t index;  // -1 where nothing is allowed
};

// mask: packed bits, lowest first, or null for all. The first of equal values wins; a NaN that is allowed wins over all.
inline Best argmax(const float* logits, const int32_t* mask, int width) {
  __m512 best = _mm512_set1_ps(-INFINITY);
  __m512i at = _mm512_set1_epi32(-1), lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int i = 0; i < width; i += kLanes, lane = _mm512_add_epi32(lane, _mm512_set1_epi32(kLanes))) {
    __mmask16 allowed = first_lanes(width - i);
    if (mask != nullptr) allowed &= static_cast<__mmask16>(static_cast<uint32_t>(mask[i / 32]) >> (i % 32));
    const __m512 value = _mm512_maskz_loadu_ps(allowed, logits + i);
    // not(value <= best) also takes NaN, and what follows NaN never replaces it
    const __mmask16 ordered = _mm512_cmp_ps_mask(best, best, _CMP_ORD_Q);
    const __mmask16 better = _mm512_mask_cmp_ps_mask(allowed & ordered, value, best, _CMP_NLE_UQ);
    best = _mm512_mask_mov_ps(best, better, value);
    at = _mm512_mask_mov_epi32(at, better, lane);
  }
  alignas(64) float values[kLanes];
  alignas(64) int32_t indices[kLanes];
  _mm512_store_ps(values, best);
  _mm512_store_si512(indices, at);
  Best result{-INFINITY, -1};
  for (int n = 0; n < kLanes; ++n) {
    if (indices[n] < 0 || std::isnan(result.value)) continue;
    const bool better = std::isnan(values[n]) || values[n] > result.value || result.index < 0;
    if (better || (values[n] == result.value && indices[n] < result.index)) result = {values[n], indices[n]};
  }
  return result;
}

// log(sum(exp(logits)))
inline float log_sum_exp(const float* logits, int width) {
  __m512 peak = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
  for (int i = 0; i < width; i += kLanes) {
    const __mmask16 lanes = first_lanes(width - i);
    peak = _mm512_mask_max_ps(peak, lanes, peak, _mm512_maskz_loadu_ps(lanes, logits + i));
  }
  const float top = _mm512_reduce_max_ps(peak);
  const __m512 tops = _mm512_set1_ps(top), floor = _mm512_set1_ps(-100.0f);  // -inf must not reach exp
  for (int i = 0; i < width; i += kLanes) {
    const __mmask16 lanes = first_lanes(width - i);
    const __m512 distance = _mm512_max_ps(floor, _mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, logits + i), tops));
    sum = _mm512_mask_add_ps(sum, lanes, sum, exp_ps(distance));
  }
  return top + std::log(_mm512_reduce_add_ps(sum));
}

}  // namespace sglite
