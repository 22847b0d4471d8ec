// What a sampler asks of every step: the likeliest allowed token, or one that is drawn.
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

// A row's filters and its number in [0, 1); see draws.py. Temperature 0: the likeliest token.
struct Draw {
  float temperature;
  int32_t top_k;  // -1: no limit
  float top_p, min_p;
  double number;
};

// One worker's choices. A token weighs exp((logit - peak) / temperature), so the likeliest weighs 1.
class Chooser {
 public:
  Best choose(const float* logits, const int32_t* mask, int width, const Draw& draw) {
    Best best = argmax(logits, mask, width);
    if (draw.temperature <= 0 || draw.top_k == 1 || best.index < 0 || !std::isfinite(best.value)) return best;
    const double whole = weigh(logits, mask, width, best.value, draw.temperature);
    const bool all = draw.top_k < 0 && draw.top_p >= 1 && draw.min_p <= 0;
    best.index = all ? invert_all(draw.number * whole, width) : invert_kept(draw, whole, width);
    return best;
  }

 private:
  struct Token {
    float weight;
    int32_t id;
  };

  // Fills weights_ and the sums of their vectors; returns the sum of all.
  double weigh(const float* logits, const int32_t* mask, int width, float peak, float temperature) {
    float* weights = weights_.reserve(round_up(width, kLanes));
    double *sums = sums_.reserve(ceil_div(width, kLanes)), whole = 0;
    const __m512 top = _mm512_set1_ps(peak), heat = _mm512_set1_ps(temperature), floor = _mm512_set1_ps(-150.0f);
    for (int i = 0; i < width; i += kLanes) {
      __mmask16 allowed = first_lanes(width - i);
      if (mask != nullptr) allowed &= static_cast<__mmask16>(static_cast<uint32_t>(mask[i / 32]) >> (i % 32));
      const __m512 distance = _mm512_div_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(allowed, logits + i), top), heat);
      const __m512 weight = _mm512_maskz_mov_ps(allowed, exp_ps(_mm512_max_ps(distance, floor)));
      _mm512_store_ps(weights + i, weight);
      whole += sums[i / kLanes] = _mm512_reduce_add_ps(weight);
    }
    return whole;
  }

  // The token, in order of ids, where the sum of weights passes target.
  int32_t invert_all(double target, int width) const {
    const float* weights = weights_.get();
    const double* sums = sums_.get();
    double mass = 0;
    int32_t last = 0;
    for (int i = 0; i < width; i += kLanes) {
      const bool here = mass + sums[i / kLanes] > target;
      double within = mass;
      for (int n = i; n < std::min(i + kLanes, width); ++n) {
        if (weights[n] <= 0) continue;
        last = n;
        if (here && (within += weights[n]) > target) return n;
      }
      mass += sums[i / kLanes];
    }
    return last;  // rounding left the target above every sum
  }

  int32_t invert_kept(const Draw& draw, double whole, int width) {
    const size_t count = keep(draw, whole, width);
    double mass = 0;
    for (size_t i = 0; i < count; ++i) mass += kept_[i].weight;
    const double target = draw.number * mass;
    mass = 0;
    for (size_t i = 0; i < count; ++i) {
      if ((mass += kept_[i].weight) > target) return kept_[i].id;
    }
    return kept_[count - 1].id;
  }

  // kept_ begins with the tokens that top-k, then top-p, then min-p leave, likeliest first; returns how many.
  size_t keep(const Draw& draw, double whole, int width) {
    const size_t most = draw.top_k < 0 ? width : std::min(draw.top_k, width);
    const bool limited = most < static_cast<size_t>(width);
    for (const float least : {1e-3f, 1e-5f, 1e-8f, 0.0f}) {
      const double mass = gather(least, width);
      // top-p counts the mass of all that top-k leaves, so what min-p drops is gathered, too, where there is a limit
      const bool enough = limited ? kept_.size() >= most : least <= draw.min_p || mass >= draw.top_p * whole;
      if (enough || least == 0) break;
    }
    const auto likelier = [](const Token& a, const Token& b) { return a.weight > b.weight || (a.weight == b.weight && a.id < b.id); };
    if (kept_.size() > most) {
      std::nth_element(kept_.begin(), kept_.begin() + most - 1, kept_.end(), likelier);
      kept_.resize(most);
    }
    std::sort(kept_.begin(), kept_.end(), likelier);
    if (limited) {
      whole = 0;
      for (const Token& token : kept_) whole += token.weight;
    }
    double before = 0;
    size_t count = 0;
    while (count < kept_.size() && before < draw.top_p * whole && kept_[count].weight >= draw.min_p) {
      before += kept_[count++].weight;
    }
    return std::max<size_t>(count, 1);
  }

  // kept_ = the tokens that weigh something, and at least that much; returns their sum.
  double gather(float least, int width) {
    kept_.clear();
    double mass = 0;
    const float* weights = weights_.get();
    for (int i = 0; i < width; i += kLanes) {
      const __m512 weight = _mm512_maskz_load_ps(first_lanes(width - i), weights + i);
      __mmask16 heavy = _mm512_cmp_ps_mask(weight, _mm512_set1_ps(least), _CMP_GE_OQ) & _mm512_cmp_ps_mask(weight, _mm512_setzero_ps(), _CMP_GT_OQ);
      for (; heavy != 0; heavy &= heavy - 1) {
        const int n = i + __builtin_ctz(heavy);
        kept_.push_back({weights[n], n});
        mass += weights[n];
      }
    }
    return mass;
  }

  Buffer<float> weights_;
  Buffer<double> sums_;
  std::vector<Token> kept_;
};

}  // namespace sglite
