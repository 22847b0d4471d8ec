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

// Where a chunk's blocks lie: `count` of them, `valid` positions in all. Values go in pairs of blocks; what is behind
// the valid positions of a pair is 0.
struct Chunk {
  const bf16 *keys[kBlocks], *values[kBlocks / 2];
  int start, count, valid;
  alignas(64) bf16 own_keys[kChunk * kMaxDim], own_values[kChunk * kMaxDim];  // what had to be arranged
};

inline void prefetch(const bf16* from, int count) {
  for (int i = 0; i < count; i += 32) _mm_prefetch(from + i, _MM_HINT_T1);
}

// What is known of 16 queries so far: values [D / 16][16 queries][16], not yet divided by `sum`.
struct State {
  alignas(64) float peak[kQueries], sum[kQueries];
  alignas(64) float values[kMaxDim / kLanes][kQueries][kLanes];

  void clear(int dim) {
    std::fill_n(peak, kQueries, kNothing);
    std::fill_n(sum, kQueries, 0.0f);
    std::memset(values, 0, sizeof(values[0]) * (dim / kLanes));
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
  void locate(const LayerPool& pool, const int32_t* pages, int page_size, int length, int start, int head,
              Chunk& chunk) const {
    chunk.start = start;
    chunk.valid = std::min(kChunk, length - start);
    chunk.count = ceil_div(chunk.valid, kLanes);
    const auto slot = [&](int p) { return static_cast<int64_t>(pages[p / page_size]) * page_size + p % page_size; };
    if (!pool.blocked()) return arrange(pool, slot, head, chunk);
    const int block_size = kLanes * dim_;
    for (int block = 0; block < chunk.count; ++block) {
      chunk.keys[block] = pool.keys(slot(start + block * kLanes), head);
    }
    for (int pair = 0; pair * 2 < chunk.count; ++pair) {
      const int first = start + pair * 2 * kLanes, second = first + kLanes;
      const bf16* values = pool.values(slot(first), head);
      const bf16* next = second < length ? pool.values(slot(second), head) : nullptr;
      const bool whole = first + 2 * kLanes <= length;
      chunk.values[pair] = values;
      if (whole && next == values + block_size) continue;
      bf16* copy = chunk.own_values + pair * 2 * block_size;
      copy_valid(values, length - first, copy);
      copy_valid(next, length - second, copy + block_size);
      chunk.values[pair] = copy;
    }
  }

  // Folds the chunk into the state of the queries. With `next`, nobody has read the chunk yet, and its values and the
  // keys of the next one are called for while there is work on what is here.
  void fold(const Queries& queries, const Chunk& chunk, State& state, const Chunk* next = nullptr) {
    const int count = std::min(chunk.count, ceil_div(queries.highest() - chunk.start, kLanes));
    if (count <= 0) return;
    if (amx_) {
      scores_by_tiles(queries, chunk, count, next != nullptr);
    } else {
      scores_by_vectors(queries, chunk, count);
    }
    weigh(queries, chunk, count);
    if (amx_) {
      values_by_tiles(chunk, count, next);
    } else {
      values_by_vectors(queries, chunk, count);
    }
    merge(peak_, sum_, out_, queries.count, state);
  }

  // Adds what another range of positions gave, which must be the next in order. A sum of 0 changes nothing.
  void merge(const float* peak, const float* sum, const float (*values)[kQueries][kLanes], int count, State& state) const {
    const __m512 old_peak = _mm512_load_ps(state.peak), new_peak = _mm512_loadu_ps(peak), added = _mm512_loadu_ps(sum);
    const __mmask16 live = _mm512_cmp_ps_mask(added, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    const __m512 top = _mm512_mask_max_ps(old_peak, live, old_peak, new_peak), sharp = _mm512_set1_ps(sharpness_);
    const __m512 keep = exp2_ps<5>(_mm512_mul_ps(_mm512_sub_ps(old_peak, top), sharp));
    const __m512 take = _mm512_maskz_mov_ps(live, exp2_ps<5>(_mm512_mul_ps(_mm512_sub_ps(new_peak, top), sharp)));
    _mm512_store_ps(state.peak, top);
    _mm512_store_ps(state.sum, _mm512_mask3_fmadd_ps(added, take, _mm512_mul_ps(_mm512_load_ps(state.sum), keep), live));
    alignas(64) float keeps[kQueries], takes[kQueries];
    _mm512_store_ps(keeps, keep);
    _mm512_store_ps(takes, take);
    for (int i = 0; i < count; ++i) {
      if (!(live >> i & 1)) continue;
      const __m512 k = _mm512_set1_ps(keeps[i]), t = _mm512_set1_ps(takes[i]);
      for (int part = 0; part < dim_ / kLanes; ++part) {
        const __m512 kept = _mm512_mul_ps(_mm512_load_ps(state.values[part][i]), k);
        _mm512_store_ps(state.values[part][i], _mm512_fmadd_ps(_mm512_load_ps(values[part][i]), t, kept));
      }
    }
  }

 private:
  // The first `filled` positions of a block of values, zeros behind them.
  void copy_valid(const bf16* block, int filled, bf16* to) const {
    filled = std::clamp(filled, 0, kLanes);
    const int whole = filled / 2 * 2 * dim_;
    if (whole > 0) std::memcpy(to, block, whole * sizeof(bf16));
    std::memset(to + whole, 0, (kLanes * dim_ - whole) * sizeof(bf16));
    if (filled % 2) {
      for (int d = 0; d < dim_; ++d) to[whole + d * 2] = block[whole + d * 2];
    }
  }

  template <class Slot>
  void arrange(const LayerPool& pool, const Slot& slot, int head, Chunk& chunk) const {
    const int block_size = kLanes * dim_;
    bf16 *keys = chunk.own_keys, *values = chunk.own_values;
    std::memset(values, 0, kChunk * dim_ * sizeof(bf16));
    for (int p = 0; p < chunk.valid; ++p) {
      const int block = p / kLanes * block_size;
      LayerPool::put_key(keys + block, p % kLanes, pool.keys(slot(chunk.start + p), head), dim_);
      LayerPool::put_value(values + block, p % kLanes, pool.values(slot(chunk.start + p), head), dim_);
    }
    for (int block = 0; block < chunk.count; ++block) chunk.keys[block] = keys + block * block_size;
    for (int pair = 0; pair < kBlocks / 2; ++pair) chunk.values[pair] = values + pair * 2 * block_size;
  }

  // Without tiles: N queries from `i` on meet M blocks (or M parts of the values) at a time; N * M sums keep the
  // multipliers busy while each waits for its last step.
  void scores_by_vectors(const Queries& queries, const Chunk& chunk, int count) {
    if (queries.count <= 4) return scores_of<4, 4>(queries, chunk, count, 0);
    for (int i = 0; i < queries.count; i += 8) scores_of<8, 2>(queries, chunk, count, i);
  }

  template <int N, int M>
  void scores_of(const Queries& queries, const Chunk& chunk, int count, int i) {
    const int dim = dim_;
    const bf16* q = queries.q + i * dim;
    for (int block = 0; block < count; block += M) {  // kBlocks is a multiple of M: there is room for all
      const bf16* keys[M];
      __m512 sum[M][N];
      for (int m = 0; m < M; ++m) {
        keys[m] = chunk.keys[std::min(block + m, count - 1)];
        for (int n = 0; n < N; ++n) sum[m][n] = _mm512_setzero_ps();
      }
      for (int d = 0; d < dim; d += 2) {
        __m512i k[M];
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) k[m] = _mm512_loadu_si512(keys[m] + d * kLanes);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          const __m512i both = _mm512_set1_epi32(pair_at(q + n * dim + d));
#pragma GCC unroll 4
          for (int m = 0; m < M; ++m) sum[m][n] = dot_bf16(sum[m][n], k[m], both);
        }
      }
      for (int m = 0; m < M; ++m) {
        for (int n = 0; n < N; ++n) _mm512_store_ps(scores_[block + m][i + n], sum[m][n]);
      }
    }
  }

  void values_by_vectors(const Queries& queries, const Chunk& chunk, int count) {
    if (queries.count <= 4) return values_of<4, 4>(chunk, count, 0);
    for (int i = 0; i < queries.count; i += 8) values_of<8, 2>(chunk, count, i);
  }

  template <int N, int M>
  void values_of(const Chunk& chunk, int count, int i) {
    const int dim = dim_, parts = dim / kLanes;
    for (int part = 0; part < parts; part += M) {
      int column[M];
      __m512 sum[M][N];
      for (int m = 0; m < M; ++m) {
        column[m] = std::min(part + m, parts - 1) * 2 * kLanes;
        for (int n = 0; n < N; ++n) sum[m][n] = _mm512_setzero_ps();
      }
      for (int block = 0; block < count; ++block) {
        const bf16* weights = weights_[block / 2][i] + block % 2 * kLanes;
        const bf16* values = chunk.values[block / 2] + block % 2 * kLanes * dim;
        for (int pair = 0; pair < kLanes / 2; ++pair, weights += 2, values += 2 * dim) {
          __m512i v[M];
#pragma GCC unroll 4
          for (int m = 0; m < M; ++m) v[m] = _mm512_loadu_si512(values + column[m]);
#pragma GCC unroll 8
          for (int n = 0; n < N; ++n) {
            const __m512i both = _mm512_set1_epi32(pair_at(weights + n * 2 * kLanes));
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) sum[m][n] = dot_bf16(sum[m][n], v[m], both);
          }
        }
      }
      for (int m = 0; m < M && part + m < parts; ++m) {
        for (int n = 0; n < N; ++n) _mm512_store_ps(out_[part + m][i + n], sum[m][n]);
      }
    }
  }

  static int pair_at(const bf16* from) {
    int pair;
    std::memcpy(&pair, from, sizeof(pair));
    return pair;
  }

  void scores_by_tiles(const Queries& queries, const Chunk& chunk, int count, bool fresh) {
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
      for (int pair = block / 2; fresh && pair * 2 < std::min(count, block + 4); ++pair) {
        prefetch(chunk.values[pair], 2 * kLanes * dim_);
      }
      TILE_STORE(0, scores_[block], 64);  // kBlocks is a multiple of 4: there is room for all
      TILE_STORE(1, scores_[block + 1], 64);
      TILE_STORE(2, scores_[block + 2], 64);
      TILE_STORE(3, scores_[block + 3], 64);
    }
#else
    (void)queries, (void)chunk, (void)count, (void)fresh;
#endif
  }

  void values_by_tiles(const Chunk& chunk, int count, const Chunk* next) {
#if SGLITE_AMX
    const long stride = dim_ * 2 * sizeof(bf16);
    for (int d = 0; d < dim_; d += 4 * kLanes) {
      const int parts = std::min(4, (dim_ - d) / kLanes);
      const int second = parts > 1 ? 2 * kLanes : 0, third = parts > 2 ? 4 * kLanes : 0, fourth = parts > 3 ? 6 * kLanes : 0;
      TILE_ZERO(0);
      TILE_ZERO(1);
      TILE_ZERO(2);
      TILE_ZERO(3);
      for (int pair = 0; pair * 2 < count; ++pair) {
        const bf16* values = chunk.values[pair] + d * 2;
        TILE_LOAD(4, weights_[pair], 64);
        TILE_LOAD(6, values, stride);
        TILE_DOT_BF16(0, 4, 6);
        TILE_LOAD(6, values + second, stride);
        TILE_DOT_BF16(1, 4, 6);
        TILE_LOAD(6, values + third, stride);
        TILE_DOT_BF16(2, 4, 6);
        TILE_LOAD(6, values + fourth, stride);
        TILE_DOT_BF16(3, 4, 6);
        for (int n = 0; next != nullptr && d == 0 && n < 2 && pair * 2 + n < next->count; ++n) {
          prefetch(next->keys[pair * 2 + n], kLanes * dim_);
        }
      }
      auto* to = out_ + d / kLanes;
      TILE_STORE(0, to[0], 64);
      if (parts > 1) TILE_STORE(1, to[1], 64);
      if (parts > 2) TILE_STORE(2, to[2], 64);
      if (parts > 3) TILE_STORE(3, to[3], 64);
    }
#else
    (void)chunk, (void)count, (void)next;
#endif
  }

  // Scores to weights 2^(sharpness * (score - peak)), in bf16; what a query may not see weighs nothing.
  void weigh(const Queries& queries, const Chunk& chunk, int count) {
    if (shape_.softcap > 0) soften(queries.count, count);
    for (int i = 0; i < queries.count; ++i) {
      with_mask(queries, chunk, count, i, [&](const auto& seen) { find_peak(i, count, seen); });
    }
    _mm512_store_ps(peak_, reduce_rows(partial_, Larger()));
    if (amx_) keep_tiles_awake();
    for (int i = 0; i < queries.count; ++i) {
      with_mask(queries, chunk, count, i, [&](const auto& seen) { weigh_row(i, count, seen); });
      if (amx_ && i % 8 == 7) keep_tiles_awake();
    }
    _mm512_store_ps(sum_, _mm512_maskz_mov_ps(first_lanes(queries.count), reduce_rows(partial_, Sum())));
  }

  // Calls work(seen), where seen(block) are the positions of a block that query i may see.
  template <class Work>
  static void with_mask(const Queries& queries, const Chunk& chunk, int count, int i, const Work& work) {
    const int low = queries.first[i] - chunk.start, high = std::min(queries.limit[i] - chunk.start, chunk.valid);
    if (low <= 0 && high >= count * kLanes) return work([](int) { return static_cast<__mmask16>(0xFFFF); });
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    work([low, high, lanes](int block) {
      const __mmask16 before = _mm512_cmplt_epi32_mask(lanes, _mm512_set1_epi32(high - block * kLanes));
      return _mm512_mask_cmpge_epi32_mask(before, lanes, _mm512_set1_epi32(low - block * kLanes));
    });
  }

  template <class Seen>
  void find_peak(int i, int count, const Seen& seen) {
    __m512 peak = _mm512_set1_ps(kNothing);
    for (int block = 0; block < count; ++block) {
      peak = _mm512_mask_max_ps(peak, seen(block), peak, _mm512_load_ps(scores_[block][i]));
    }
    _mm512_store_ps(partial_[i], peak);
  }

  template <class Seen>
  void weigh_row(int i, int count, const Seen& seen) {
    const __m512 sharp = _mm512_set1_ps(sharpness_), shift = _mm512_set1_ps(-peak_[i] * sharpness_);
    __m512 sum = _mm512_setzero_ps();
    for (int block = 0; block < count; ++block) {
      const __m512 exponent = _mm512_fmadd_ps(_mm512_load_ps(scores_[block][i]), sharp, shift);
      const __m512 weight = _mm512_maskz_mov_ps(seen(block), exp2_ps<3>(exponent));
      sum = _mm512_add_ps(sum, weight);
      put_weights(i, block, weight);
    }
    if (count % 2 != 0) put_weights(i, count, _mm512_setzero_ps());  // the rest of the last pair
    _mm512_store_ps(partial_[i], sum);
  }

  void put_weights(int i, int block, __m512 weights) {
    store_bf16(weights_[block / 2][i] + block % 2 * kLanes, weights);
  }

  void soften(int queries, int count) {  // cap * tanh(scale * score / cap)
    const __m512 factor = _mm512_set1_ps(2 * shape_.scale / shape_.softcap), cap = _mm512_set1_ps(shape_.softcap);
    const __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
    for (int n = 0; n < queries * count; ++n) {
      float* scores = scores_[n % count][n / count];
      const __m512 e = exp_ps(_mm512_mul_ps(_mm512_load_ps(scores), factor));
      const __m512 tanh = _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(e, one)));
      _mm512_store_ps(scores, _mm512_mul_ps(cap, tanh));
    }
  }

  AttentionShape shape_{};
  bool amx_ = false;
  int dim_ = 0;
  float sharpness_ = 0;
  alignas(64) float scores_[kBlocks][kQueries][kLanes];
  alignas(64) bf16 weights_[kBlocks / 2][kQueries][2 * kLanes] = {};
  alignas(64) float out_[kMaxDim / kLanes][kQueries][kLanes];
  alignas(64) float partial_[kQueries][kLanes] = {};
  alignas(64) float peak_[kQueries], sum_[kQueries];
};

}  // namespace sglite
