// The key/value pool and the batch that reads it.
//
// Each layer and key/value head has its own stretch of positions, so that neighbouring pages are neighbours in memory.
// With pages of a multiple of 16 positions a stretch consists of blocks of 16:
//   keys    bf16 [D / 2][16 positions][2]: 16 scores are one vector, and a tile's right operand lies ready
//   values  bf16 [8 pairs of positions][D][2]
// With other page sizes it lies position by position, and attention arranges the blocks it needs as it goes.
#pragma once

#include "common.h"

namespace sglite {

struct Batch {
  int32_t tokens, rows, wanted, pages_per_row, page_size, unused;
  const int64_t *ids, *positions;
  const int32_t *indptr, *kv_lengths, *page_table;
  const int64_t *write_slots, *wanted_tokens;

  int new_tokens(int row) const { return indptr[row + 1] - indptr[row]; }
};

struct Pool {
  bf16 *keys, *values;  // of all layers
  int64_t positions;     // of a layer and head
  int32_t kv_heads, head_dim, blocked, unused;
};

// One layer of the pool.
class LayerPool {
 public:
  LayerPool(const Pool& pool, int64_t layer)
      : keys_(pool.keys + layer * pool.kv_heads * pool.positions * pool.head_dim),
        values_(pool.values + layer * pool.kv_heads * pool.positions * pool.head_dim),
        positions_(pool.positions),
        dim_(pool.head_dim),
        blocked_(pool.blocked != 0) {}

  bool blocked() const { return blocked_; }

  // The position's block, or the position itself where the pool is not blocked.
  const bf16* keys(int64_t slot, int head) const { return keys_ + at(slot, head); }
  const bf16* values(int64_t slot, int head) const { return values_ + at(slot, head); }

  // k and v: one position's D numbers of one head.
  void write(int64_t slot, int head, const bf16* k, const bf16* v) const {
    bf16 *keys = keys_ + at(slot, head), *values = values_ + at(slot, head);
    if (blocked_) {
      put_key(keys, slot % kLanes, k, dim_);
      put_value(values, slot % kLanes, v, dim_);
    } else {
      std::memcpy(keys, k, dim_ * sizeof(bf16));
      std::memcpy(values, v, dim_ * sizeof(bf16));
    }
  }

  static void put_key(bf16* block, int lane, const bf16* k, int dim) {
    for (int d = 0; d < dim; d += 2) std::memcpy(block + d * kLanes + lane * 2, k + d, 4);
  }
  static void put_value(bf16* block, int lane, const bf16* v, int dim) {
    bf16* to = block + (lane / 2) * dim * 2;
    const bool odd = lane % 2 != 0;
    const __mmask32 words = odd ? 0xAAAAAAAA : 0x55555555;  // the other words may be another worker's at this moment
    for (int d = 0; d < dim; d += kLanes) {
      const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(v + d)));
      _mm512_mask_storeu_epi16(to + d * 2, words, odd ? _mm512_slli_epi32(wide, 16) : wide);
    }
  }

 private:
  int64_t at(int64_t slot, int head) const {
    return (head * positions_ + (blocked_ ? slot / kLanes * kLanes : slot)) * dim_;
  }

  bf16 *keys_, *values_;
  int64_t positions_;
  int dim_;
  bool blocked_;
};

}  // namespace sglite
