// Attention of up to 16 query vectors over one chunk of a row's positions, and the folding of chunks.
//
// A row's positions are cut into chunks of 128, counted from 0. Each chunk gives a query its own maximum, sum and
// weighted values; the chunks are folded in order (the online softmax of Milakov and Gimelshein, 2018). What a query
// gets depends on its own row alone, so batching, chunked prefill and shared prefixes change no bit.
#pragma once

#include "pool.h"
#include "tiles.h"

namespace sglite {

constexpr int kChunk = 128;
constexpr int kBlocks = kChunk / kLanes;
constexpr int kQueries = 16;
constexpr int kMaxDim = 256;
constexpr float kNothing = -1e30f;

struct AttentionShape {
  int32_t heads, kv_heads, head_dim, window;  // window 0: none
  float scale, softcap;                       // softcap 0: none

  int ratio() const { return heads / kv_heads; }
};

// Where a chunk's blocks lie: `count` of them, `valid` positions in all.
struct Chunk {
  const bf16 *keys[kBlocks], *values[kBlocks];
  int start, count, valid;
};

// What is known of 16 queries so far: values [16][D] not yet divided by `sum`.
struct State {
  alignas(64) float peak[kQueries], sum[kQueries];
  alignas(64) float values[kQueries * kMaxDim];

  void clear(int dim) {
    std::fill_n(peak, kQueries, kNothing);
    std::fill_n(sum, kQueries, 0.0f);
    std::fill_n(values, kQueries * dim, 0.0f);
  }
};

// Queries [16][D] in bf16; query i sees positions first[i] <= p < limit[i].
struct Queries {
  alignas(64) bf16 q[kQueries * kMaxDim];
  int first[kQueries], limit[kQueries], count;

  int lowest() const { return *std::min_element(first, first + count); }
  int highest() const { return *std::max_element(limit, limit + count); }
};

class ChunkWorker {
 public:
  void configure(const AttentionShape& shape, bool amx) {
    shape_ = shape;
    amx_ = amx;
    dim_ = shape.head_dim;
    sharpness_ = (shape.softcap > 0 ? 1.0f : shape.scale) * kLog2e;
  }

  // Positions [start, start + 128) of a row as blocks. What lies behind `length` is never read as a value.
  void locate(const LayerPool& pool, const int32_t* pages, int page_size, int length, int start, int head, Chunk& chunk) {
    chunk.start = start;
    chunk.valid = std::min(kChunk, length - start);
    chunk.count = ceil_div(chunk.valid, kLanes);
    for (int block = 0; block < chunk.count; ++block) {
      const int position = start + block * kLanes, filled = std::min(kLanes, length - position);
      if (pool.blocked()) {
        const int64_t slot = static_cast<int64_t>(pages[position / page_size]) * page_size + position % page_size;
        chunk.keys[block] = pool.key_block(slot / kLanes, head);
        chunk.values[block] = pool.value_block(slot / kLanes, head);
        if (filled < kLanes) chunk.values[block] = without_tail(chunk.values[block], filled);
      } else {
        arrange(pool, pages, page_size, position, filled, head, block);
        chunk.keys[block] = keys_ + block * kLanes * kMaxDim;
        chunk.values[block] = values_ + block * kLanes * kMaxDim;
      }
    }
  }

  // Folds the chunk into the state of the queries.
  void fold(const Queries& queries, const Chunk& chunk, State& state) {
    const int count = std::min(chunk.count, ceil_div(queries.highest() - chunk.start, kLanes));
    if (count <= 0) return;
    if (amx_) {
      scores_by_tiles(queries, chunk, count);
    } else {
      for (int i = 0; i < queries.count; i += 4) scores_by_vectors(queries, chunk, count, i);
    }
    weigh(queries, chunk, count);
    if (amx_) {
      values_by_tiles(chunk, count);
    } else {
      for (int i = 0; i < queries.count; i += 8) values_by_vectors(chunk, count, i);
    }
    merge(peak_, sum_, out_, queries.count, state);
  }

  // Adds what another range of positions gave, which must be the next in order. A sum of 0 changes nothing.
  void merge(const float* peak, const float* sum, const float* values, int count, State& state) const {
    const __m512 old_peak = _mm512_load_ps(state.peak), new_peak = _mm512_loadu_ps(peak), added = _mm512_loadu_ps(sum);
    const __mmask16 live = _mm512_cmp_ps_mask(added, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    const __m512 top = _mm512_mask_max_ps(old_peak, live, old_peak, new_peak), sharp = _mm512_set1_ps(sharpness_);
    const __m512 keep = exp2_ps(_mm512_mul_ps(_mm512_sub_ps(old_peak, top), sharp));
    const __m512 take = _mm512_maskz_mov_ps(live, exp2_ps(_mm512_mul_ps(_mm512_sub_ps(new_peak, top), sharp)));
    _mm512_store_ps(state.peak, top);
    _mm512_store_ps(state.sum, _mm512_mask3_fmadd_ps(added, take, _mm512_mul_ps(_mm512_load_ps(state.sum), keep), live));
    alignas(64) float keeps[kQueries], takes[kQueries];
    _mm512_store_ps(keeps, keep);
    _mm512_store_ps(takes, take);
    for (int i = 0; i < count; ++i) {
      if (!(live >> i & 1)) continue;
      const __m512 k = _mm512_set1_ps(keeps[i]), t = _mm512_set1_ps(takes[i]);
      for (int d = i * dim_; d < (i + 1) * dim_; d += kLanes) {
        const __m512 kept = _mm512_mul_ps(_mm512_loadu_ps(state.values + d), k);
        _mm512_storeu_ps(state.values + d, _mm512_fmadd_ps(_mm512_loadu_ps(values + d), t, kept));
      }
    }
  }

 private:
  const bf16* without_tail(const bf16* block, int filled) {
    const int whole = filled / 2 * 2 * dim_;
    std::memcpy(tail_, block, whole * sizeof(bf16));
    std::memset(tail_ + whole, 0, (kLanes * dim_ - whole) * sizeof(bf16));
    if (filled % 2) {
      for (int d = 0; d < dim_; ++d) tail_[whole + d * 2] = block[whole + d * 2];
    }
    return tail_;
  }

  void arrange(const LayerPool& pool, const int32_t* pages, int page_size, int position, int filled, int head, int block) {
    bf16 *keys = keys_ + block * kLanes * kMaxDim, *values = values_ + block * kLanes * kMaxDim;
    std::memset(values, 0, kLanes * dim_ * sizeof(bf16));
    for (int lane = 0; lane < filled; ++lane) {
      const int p = position + lane;
      const int64_t slot = static_cast<int64_t>(pages[p / page_size]) * page_size + p % page_size;
      LayerPool::put_key(keys, lane, pool.key_row(slot, head), dim_);
      LayerPool::put_value(values, lane, pool.value_row(slot, head), dim_);
    }
  }

  void scores_by_vectors(const Queries& queries, const Chunk& chunk, int count, int i) {
    const bf16* q = queries.q + i * dim_;
    for (int block = 0; block < count; ++block) {
      const bf16* keys = chunk.keys[block];
      __m512 sum[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
      for (int d = 0; d < dim_; d += 2, keys += 2 * kLanes) {
        const __m512i k = _mm512_loadu_si512(keys);
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) {
          int pair;
          std::memcpy(&pair, q + n * dim_ + d, 4);
          sum[n] = dot_bf16(sum[n], k, _mm512_set1_epi32(pair));
        }
      }
      for (int n = 0; n < 4; ++n) _mm512_store_ps(scores_ + (i + n) * kChunk + block * kLanes, sum[n]);
    }
  }

  void values_by_vectors(const Chunk& chunk, int count, int i) {
    for (int d = 0; d < dim_; d += kLanes) {
      __m512 sum[8];
      for (auto& s : sum) s = _mm512_setzero_ps();
      for (int block = 0; block < count; ++block) {
        const bf16* weights = weights_ + i * kChunk + block * kLanes;
        for (int pair = 0; pair < kLanes / 2; ++pair) {
          const __m512i v = _mm512_loadu_si512(chunk.values[block] + (pair * dim_ + d) * 2);
#pragma GCC unroll 8
          for (int n = 0; n < 8; ++n) {
            int both;
            std::memcpy(&both, weights + n * kChunk + pair * 2, 4);
            sum[n] = dot_bf16(sum[n], v, _mm512_set1_epi32(both));
          }
        }
      }
      for (int n = 0; n < 8; ++n) _mm512_storeu_ps(out_ + (i + n) * dim_ + d, sum[n]);
    }
  }

  void scores_by_tiles(const Queries& queries, const Chunk& chunk, int count) {
#if SGLITE_AMX
    const long stride = dim_ * sizeof(bf16);
    for (int block = 0; block < count; block += 4) {
      const bf16* keys[4];
      for (int n = 0; n < 4; ++n) keys[n] = chunk.keys[std::min(block + n, count - 1)];
      TILE_ZERO(0);
      TILE_ZERO(1);
      TILE_ZERO(2);
      TILE_ZERO(3);
      int d = 0;
      for (; d + 32 <= dim_; d += 32) {
        TILE_LOAD(4, queries.q + d, stride);
        TILE_LOAD(6, keys[0] + d * kLanes, 64);
        TILE_DOT_BF16(0, 4, 6);
        TILE_LOAD(6, keys[1] + d * kLanes, 64);
        TILE_DOT_BF16(1, 4, 6);
        TILE_LOAD(6, keys[2] + d * kLanes, 64);
        TILE_DOT_BF16(2, 4, 6);
        TILE_LOAD(6, keys[3] + d * kLanes, 64);
        TILE_DOT_BF16(3, 4, 6);
      }
      if (d < dim_) {  // 16 columns are left
        TILE_LOAD(5, queries.q + d, stride);
        TILE_LOAD(7, keys[0] + d * kLanes, 64);
        TILE_DOT_BF16(0, 5, 7);
        TILE_LOAD(7, keys[1] + d * kLanes, 64);
        TILE_DOT_BF16(1, 5, 7);
        TILE_LOAD(7, keys[2] + d * kLanes, 64);
        TILE_DOT_BF16(2, 5, 7);
        TILE_LOAD(7, keys[3] + d * kLanes, 64);
        TILE_DOT_BF16(3, 5, 7);
      }
      float* to = scores_ + block * kLanes;  // kBlocks is a multiple of 4: the row has room for all four
      TILE_STORE(0, to, kChunk * 4);
      TILE_STORE(1, to + kLanes, kChunk * 4);
      TILE_STORE(2, to + 2 * kLanes, kChunk * 4);
      TILE_STORE(3, to + 3 * kLanes, kChunk * 4);
    }
#else
    (void)queries, (void)chunk, (void)count;
#endif
  }

  void values_by_tiles(const Chunk& chunk, int count) {
#if SGLITE_AMX
    const long stride = dim_ * 2 * sizeof(bf16);
    for (int d = 0; d < dim_; d += 4 * kLanes) {
      const int parts = std::min(4, (dim_ - d) / kLanes);
      const int second = parts > 1 ? 2 * kLanes : 0, third = parts > 2 ? 4 * kLanes : 0, fourth = parts > 3 ? 6 * kLanes : 0;
      TILE_ZERO(0);
      TILE_ZERO(1);
      TILE_ZERO(2);
      TILE_ZERO(3);
      for (int block = 0; block < count; ++block) {
        const bf16* values = chunk.values[block] + d * 2;
        TILE_LOAD(5, weights_ + block * kLanes, kChunk * sizeof(bf16));
        TILE_LOAD(7, values, stride);
        TILE_DOT_BF16(0, 5, 7);
        TILE_LOAD(7, values + second, stride);
        TILE_DOT_BF16(1, 5, 7);
        TILE_LOAD(7, values + third, stride);
        TILE_DOT_BF16(2, 5, 7);
        TILE_LOAD(7, values + fourth, stride);
        TILE_DOT_BF16(3, 5, 7);
      }
      float* to = out_ + d;
      TILE_STORE(0, to, dim_ * 4);
      if (parts > 1) TILE_STORE(1, to + kLanes, dim_ * 4);
      if (parts > 2) TILE_STORE(2, to + 2 * kLanes, dim_ * 4);
      if (parts > 3) TILE_STORE(3, to + 3 * kLanes, dim_ * 4);
    }
#else
    (void)chunk, (void)count;
#endif
  }

  // Scores to weights 2^(sharpness * (score - peak)), in bf16; what a query may not see weighs nothing.
  void weigh(const Queries& queries, const Chunk& chunk, int count) {
    for (int i = 0; i < queries.count; ++i) {
      const int low = queries.first[i] - chunk.start, high = std::min(queries.limit[i] - chunk.start, chunk.valid);
      float* scores = scores_ + i * kChunk;
      if (shape_.softcap > 0) soften(scores, count);
      __m512 peak = _mm512_set1_ps(kNothing), sum = _mm512_setzero_ps();
      for (int block = 0; block < count; ++block) {
        peak = _mm512_mask_max_ps(peak, seen(block, low, high), peak, _mm512_load_ps(scores + block * kLanes));
      }
      peak_[i] = _mm512_reduce_max_ps(peak);
      const __m512 sharp = _mm512_set1_ps(sharpness_), shift = _mm512_set1_ps(-peak_[i] * sharpness_);
      for (int block = 0; block < count; ++block) {
        const __m512 exponent = _mm512_fmadd_ps(_mm512_load_ps(scores + block * kLanes), sharp, shift);
        const __m512 weight = _mm512_maskz_mov_ps(seen(block, low, high), exp2_ps(exponent));
        sum = _mm512_add_ps(sum, weight);
        store_bf16(weights_ + i * kChunk + block * kLanes, weight);
      }
      sum_[i] = _mm512_reduce_add_ps(sum);
    }
    std::fill(sum_ + queries.count, sum_ + kQueries, 0.0f);
  }

  static __mmask16 seen(int block, int low, int high) {
    return first_lanes(high - block * kLanes) & ~first_lanes(low - block * kLanes);
  }

  void soften(float* scores, int count) const {  // cap * tanh(scale * score / cap)
    const __m512 factor = _mm512_set1_ps(2 * shape_.scale / shape_.softcap), cap = _mm512_set1_ps(shape_.softcap);
    const __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
    for (int block = 0; block < count; ++block) {
      const __m512 e = exp_ps(_mm512_mul_ps(_mm512_load_ps(scores + block * kLanes), factor));
      const __m512 tanh = _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(e, one)));
      _mm512_store_ps(scores + block * kLanes, _mm512_mul_ps(cap, tanh));
    }
  }

  AttentionShape shape_{};
  bool amx_ = false;
  int dim_ = 0;
  float sharpness_ = 0;
  alignas(64) float scores_[kQueries * kChunk];
  alignas(64) bf16 weights_[kQueries * kChunk] = {};
  alignas(64) float out_[kQueries * kMaxDim];
  alignas(64) float peak_[kQueries], sum_[kQueries];
  alignas(64) bf16 tail_[kLanes * kMaxDim];
  alignas(64) bf16 keys_[kChunk * kMaxDim], values_[kChunk * kMaxDim];
};

}  // namespace sglite
