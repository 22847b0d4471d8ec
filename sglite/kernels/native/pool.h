// The key/value pool and the batch that reads it.
//
// With pages of a multiple of 16 positions the pool lies in blocks of 16 positions, per block and key/value head:
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
  int64_t layer_stride;  // in elements
  int32_t kv_heads, head_dim, page_size, blocked;
};

// One layer of the pool.
class LayerPool {
 public:
  LayerPool(const Pool& pool, int layer)
      : keys_(pool.keys + layer * pool.layer_stride),
        values_(pool.values + layer * pool.layer_stride),
        heads_(pool.kv_heads),
        dim_(pool.head_dim),
        blocked_(pool.blocked != 0) {}

  bool blocked() const { return blocked_; }
  const bf16* key_block(int64_t block, int head) const { return keys_ + (block * heads_ + head) * kLanes * dim_; }
  const bf16* value_block(int64_t block, int head) const { return values_ + (block * heads_ + head) * kLanes * dim_; }
  const bf16* key_row(int64_t slot, int head) const { return keys_ + (slot * heads_ + head) * dim_; }
  const bf16* value_row(int64_t slot, int head) const { return values_ + (slot * heads_ + head) * dim_; }

  // k and v: one position's D numbers of one head.
  void write(int64_t slot, int head, const bf16* k, const bf16* v) const {
    if (!blocked_) {
      std::memcpy(keys_ + (slot * heads_ + head) * dim_, k, dim_ * sizeof(bf16));
      std::memcpy(values_ + (slot * heads_ + head) * dim_, v, dim_ * sizeof(bf16));
      return;
    }
    const int64_t at = (slot / kLanes * heads_ + head) * kLanes * dim_;
    put_key(keys_ + at, slot % kLanes, k, dim_);
    put_value(values_ + at, slot % kLanes, v, dim_);
  }

  static void put_key(bf16* block, int lane, const bf16* k, int dim) {
    for (int d = 0; d < dim; d += 2) std::memcpy(block + d * kLanes + lane * 2, k + d, 4);
  }
  static void put_value(bf16* block, int lane, const bf16* v, int dim) {
    bf16* to = block + (lane / 2) * dim * 2 + (lane % 2);
    for (int d = 0; d < dim; ++d) to[d * 2] = v[d];
  }

 private:
  bf16 *keys_, *values_;
  int heads_, dim_;
  bool blocked_;
};

}  // namespace sglite
