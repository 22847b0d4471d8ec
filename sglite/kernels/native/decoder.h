// A whole decoder in one call: embedding, all layers and the final norm, on a team of threads.
//
// The residual stays in fp32. Every phase is a list of pieces that workers take one by one, ended by a barrier; a few
// rows are normed and encoded by every worker for itself, which is cheaper than a barrier.
#pragma once

#include "attention_step.h"
#include "rows.h"
#include "tile_line.h"

namespace sglite {

struct LayerWeights {
  const float *attention_norm, *mlp_norm, *q_norm, *k_norm;  // the last two may be null
  Matrix qkv, o, gate_up, down;
  int32_t window, unused;
};

struct DecoderWeights {
  int32_t layers, hidden, intermediate, vocabulary;
  float eps;
  int32_t embedding_kind;  // 0: fp32 rows, 1: bf16 rows, 2: a packed matrix
  AttentionShape attention;
  const void* embedding;
  const float *final_norm, *cos, *sin;
  const LayerWeights* layer;
};

constexpr int kManyRows = 128;   // from here on a pair of panels is a piece of work of its own
constexpr int kPrivateRows = 4;  // up to here each worker encodes all rows itself

// What one worker needs beside the team's common buffers.
struct Worker {
  Activations activations;
  Buffer<float> row;
  Unit unit;
#if SGLITE_AMX
  LineSums sums;
#endif
};

// Products on a team: encodes rows once, then shares out pairs of panels.
class Products {
 public:
  Products(Team& team, bool amx) : team_(team), amx_(amx) {
    for (int i = 0; i < team.size(); ++i) workers_.emplace_back(new Worker);
  }

  bool amx() const { return amx_; }
  Team& team() { return team_; }

  // Tiles are configured per thread; attention and products want different ones.
  void enter() const {
#if SGLITE_AMX
    static const TileShapes shapes = tile_shapes(false);
    if (amx_) load_shapes(shapes);
#endif
  }
  void enter_attention() const {
#if SGLITE_AMX
    static const TileShapes shapes = tile_shapes(true);
    if (amx_) load_shapes(shapes);
#endif
  }
  void leave() const {
#if SGLITE_AMX
    if (amx_) TILE_RELEASE();
#endif
  }

  // On every worker. source(row, scratch) gives a row's `w.columns` numbers, in place or written to the scratch.
  template <class Source>
  const Activations& encode(int id, const Matrix& w, int rows, const Source& source) {
    const Coding coding = coding_for(w, rows, amx_);
    float* scratch = workers_[id]->row.reserve(w.padded_columns);
    std::fill(scratch + w.columns, scratch + w.padded_columns, 0.0f);
    const auto encode_range = [&](Activations& to, int begin, int end) {
      for (int row = begin; row < end; ++row) {
        const float* x = source(row, scratch);
        if (x != scratch && w.columns != w.padded_columns) x = std::copy_n(x, w.columns, scratch) - w.columns;
        to.encode(row, x);
      }
    };
    if (rows <= kPrivateRows) {
      Activations& own = workers_[id]->activations;
      own.shape(coding, rows, w.padded_columns);
      encode_range(own, 0, rows);
      return own;
    }
    if (id == 0) shared_.shape(coding, rows, w.padded_columns);
    team_.barrier();
    team_.share(rows, pieces(rows), [&](int begin, int end) { encode_range(shared_, begin, end); });
    return shared_;
  }

  // On every worker. Pair i of panels is pair(i); sink(row, a, b, ya, yb) takes 16 results of each panel, bias added.
  template <class Pair, class Sink>
  void multiply(int id, const Matrix& w, const Activations& x, int rows, int pairs, const Pair& pair, const Sink& sink) {
    if (w.bias == nullptr) return multiply_bare(id, w, x, rows, pairs, pair, sink);
    multiply_bare(id, w, x, rows, pairs, pair, [&](int row, int a, int b, __m512 ya, __m512 yb) {
      const auto biased = [&w](int panel, __m512 y) { return _mm512_add_ps(y, _mm512_loadu_ps(w.bias + panel * kLanes)); };
      sink(row, a, b, biased(a, ya), biased(b, yb));
    });
  }

  // All panels in order; sink(row, panel, y) takes 16 results.
  template <class Sink>
  void multiply_all(int id, const Matrix& w, const Activations& x, int rows, const Sink& sink) {
    const int panels = w.panels();
    const auto pair = [panels](int i) { return std::pair<int, int>(2 * i, std::min(2 * i + 1, panels - 1)); };
    multiply(id, w, x, rows, ceil_div(panels, 2), pair, [&](int row, int a, int b, __m512 ya, __m512 yb) {
      sink(row, a, ya);
      if (b != a) sink(row, b, yb);
    });
  }

  // Enough pieces that an interrupted worker holds nobody up for long, few enough that tickets cost nothing.
  int pieces(int count) const { return std::min(count, 4 * team_.size()); }

 private:
  template <class Pair, class Sink>
  void multiply_bare(int id, const Matrix& w, const Activations& x, int rows, int pairs, const Pair& pair, const Sink& sink) {
#if SGLITE_AMX
    if (x.coding() == Coding::kInt16) return by_tiles<kInt8>(id, w, x, rows, pairs, pair, sink);
    if (x.coding() == Coding::kBf16 && amx_) return by_tiles<kDense>(id, w, x, rows, pairs, pair, sink);
#endif
    Unit& unit = workers_[id]->unit;
    team_.share(pairs, cut(pairs, rows), [&](int begin, int end) {
      for (int i = begin; i < end; ++i) {
        const auto [a, b] = pair(i);
        for (int row = 0; row < rows; row += kUnitRows) product(w, x, row, std::min(kUnitRows, rows - row), a, b, unit, sink);
      }
    });
  }

#if SGLITE_AMX
  template <Format F, class Pair, class Sink>
  void by_tiles(int id, const Matrix& w, const Activations& x, int rows, int pairs, const Pair& pair, const Sink& sink) {
    TileLine<F, Sink> line(w, x, workers_[id]->sums, sink);
    team_.hand_out(pairs, cut(pairs, rows), [&](int begin, int end, int next) {
      for (int i = begin; i < end; ++i) {
        if (const int after = i + 1 < end ? i + 1 : next; after < pairs) {
          line.look_ahead(rows, pair(after).first, pair(after).second);
        }
        line.multiply(rows, pair(i).first, pair(i).second);
      }
    });
    line.drain();
    team_.barrier();
  }
#endif

  int cut(int pairs, int rows) const { return rows >= kManyRows ? pairs : pieces(pairs); }

  Team& team_;
  const bool amx_;
  Activations shared_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

class Decoder {
 public:
  Decoder(Products& products, AttentionStep& attention, const DecoderWeights& weights)
      : products_(products), attention_(attention), weights_(weights) {}

  // hidden: fp32 [wanted][hidden size]
  void run(const Batch& batch, const Pool& pool, float* hidden) {
    prepare(batch, pool);
    products_.team().run([&](int id) {
      products_.enter();
      embed();
      for (int layer = 0; layer < weights_.layers; ++layer) run_layer(id, layer);
      team().share(rows_, products_.pieces(rows_), [&](int begin, int end) {
        for (int r = begin; r < end; ++r) {
          rms_norm(row_of(x_, r, hidden_), weights_.final_norm, weights_.eps, hidden_, row_of(hidden, r, hidden_));
        }
      });
      products_.leave();
    });
  }

 private:
  Team& team() { return products_.team(); }
  int query_size() const { return weights_.attention.heads * weights_.attention.head_dim; }
  int qkv_size() const { return query_size() + 2 * weights_.attention.kv_heads * weights_.attention.head_dim; }

  void prepare(const Batch& batch, const Pool& pool) {
    batch_ = batch;
    pool_ = pool;
    rows_ = batch.tokens;
    hidden_ = weights_.hidden;
    const size_t tokens = batch.tokens;
    x_ = x_buffer_.reserve(tokens * hidden_);
    kept_buffer_.reserve(static_cast<size_t>(batch.wanted) * hidden_);
    const size_t block = std::min<size_t>(tokens, kBlockRows);
    qkv_ = qkv_buffer_.reserve(block * round_up(qkv_size(), kLanes));
    kept_y_ = kept_y_buffer_.reserve(static_cast<size_t>(batch.wanted) * query_size());
    q_ = q_buffer_.reserve(tokens * query_size());
    y_ = y_buffer_.reserve(tokens * query_size());
    gated_ = gated_buffer_.reserve(block * weights_.intermediate);
    AttentionShape shape = weights_.attention;
    for (int i = 0; i < weights_.layers; ++i) shape.window = std::max(shape.window, weights_.layer[i].window);
    attention_.plan(batch, shape, pool.blocked != 0);
  }

  void embed() {
    team().share(rows_, products_.pieces(rows_), [&](int begin, int end) {
      for (int t = begin; t < end; ++t) embed_row(batch_.ids[t], x_ + static_cast<size_t>(t) * hidden_);
    });
  }

  void embed_row(int64_t token, float* to) const {
    const size_t at = static_cast<size_t>(token) * hidden_;
    if (weights_.embedding_kind == 0) {
      std::copy_n(static_cast<const float*>(weights_.embedding) + at, hidden_, to);
    } else if (weights_.embedding_kind == 1) {
      from_bf16(static_cast<const bf16*>(weights_.embedding) + at, hidden_, to);
    } else {
      unpack_row(*static_cast<const Matrix*>(weights_.embedding), token, to);
    }
  }

  void run_layer(int id, int index) {
    const LayerWeights& layer = weights_.layer[index];
    const LayerPool pool(pool_, index);
    for (int start = 0; start < rows_; start += kBlockRows) {
      const int rows = std::min(kBlockRows, rows_ - start);
      project_qkv(id, layer, start, rows);
      team().share(rows, products_.pieces(rows), [&](int begin, int end) {
        for (int row = begin; row < end; ++row) place(layer, pool, start, row);
      });
    }
    const bool last = index + 1 == weights_.layers;
    if (last && batch_.wanted == 0) {
      if (id == 0) rows_ = 0;
      team().barrier();
      return;
    }
    products_.enter_attention();
    attention_.run(id, pool, q_, y_, layer.window);
    products_.enter();
    if (last && batch_.wanted < batch_.tokens) keep_wanted(id);
    for (int start = 0; start < rows_; start += kBlockRows) {
      const int rows = std::min(kBlockRows, rows_ - start);
      project_out(id, layer, start, rows);
      feed_forward(id, layer, start, rows);
    }
  }

  float* row_of(float* rows, int row, int size) const { return rows + static_cast<size_t>(row) * size; }

  void project_qkv(int id, const LayerWeights& layer, int start, int rows) {
    const Activations& x = products_.encode(id, layer.qkv, rows, [&](int row, float* to) {
      rms_norm(row_of(x_, start + row, hidden_), layer.attention_norm, weights_.eps, hidden_, to);
      return to;
    });
    const int stride = round_up(qkv_size(), kLanes);
    products_.multiply_all(id, layer.qkv, x, rows, [&](int row, int panel, __m512 y) {
      _mm512_storeu_ps(row_of(qkv_, row, stride) + panel * kLanes, y);
    });
  }

  // A token's query, key and value: norms of heads, RoPE, bf16; key and value go into the pool.
  void place(const LayerWeights& layer, const LayerPool& pool, int start, int row_index) {
    const int dim = weights_.attention.head_dim, heads = weights_.attention.heads, kv_heads = weights_.attention.kv_heads;
    const int token = start + row_index;
    float* row = row_of(qkv_, row_index, round_up(qkv_size(), kLanes));
    const float* cos = weights_.cos + batch_.positions[token] * (dim / 2);
    const float* sin = weights_.sin + batch_.positions[token] * (dim / 2);
    for (int head = 0; head < heads; ++head) {
      if (layer.q_norm != nullptr) rms_norm(row + head * dim, layer.q_norm, weights_.eps, dim, row + head * dim);
      rotate(row + head * dim, cos, sin, dim, q_ + static_cast<size_t>(token) * query_size() + head * dim);
    }
    alignas(64) bf16 k[kMaxDim], v[kMaxDim];
    for (int head = 0; head < kv_heads; ++head) {
      float *key = row + query_size() + head * dim, *value = key + kv_heads * dim;
      if (layer.k_norm != nullptr) rms_norm(key, layer.k_norm, weights_.eps, dim, key);
      rotate(key, cos, sin, dim, k);
      to_bf16(value, dim, v);
      pool.write(batch_.write_slots[token], head, k, v);
    }
  }

  // Nobody asks for the other rows any more: the last layer goes on with the wanted ones.
  void keep_wanted(int id) {
    float *x = kept_buffer_.get(), *y = kept_y_;
    team().share(batch_.wanted, products_.pieces(batch_.wanted), [&](int begin, int end) {
      for (int r = begin; r < end; ++r) {
        const size_t token = batch_.wanted_tokens[r];
        std::copy_n(x_ + token * hidden_, hidden_, row_of(x, r, hidden_));
        std::copy_n(y_ + token * query_size(), query_size(), row_of(y, r, query_size()));
      }
    });
    if (id == 0) {
      rows_ = batch_.wanted;
      x_ = x;
      y_ = y;
    }
    team().barrier();
  }

  void project_out(int id, const LayerWeights& layer, int start, int rows) {
    const Activations& y = products_.encode(id, layer.o, rows, [&](int row, float*) {
      return row_of(y_, start + row, query_size());
    });
    add_product(id, layer.o, y, start, rows);
  }

  void add_product(int id, const Matrix& w, const Activations& x, int start, int rows) {
    products_.multiply_all(id, w, x, rows, [&](int row, int panel, __m512 y) {
      float* to = row_of(x_, start + row, hidden_) + panel * kLanes;
      _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), y));
    });
  }

  void feed_forward(int id, const LayerWeights& layer, int start, int rows) {
    const int size = weights_.intermediate, panels = size / kLanes;
    const Activations& x = products_.encode(id, layer.gate_up, rows, [&](int row, float* to) {
      rms_norm(row_of(x_, start + row, hidden_), layer.mlp_norm, weights_.eps, hidden_, to);
      return to;
    });
    const auto pair = [panels](int i) { return std::pair<int, int>(i, i + panels); };
    const auto gate = [&](int row, int panel, int, __m512 g, __m512 u) {
      _mm512_storeu_ps(row_of(gated_, row, size) + panel * kLanes, _mm512_mul_ps(silu(g), u));
    };
    products_.multiply(id, layer.gate_up, x, rows, panels, pair, gate);
    const Activations& h = products_.encode(id, layer.down, rows, [&](int row, float*) { return row_of(gated_, row, size); });
    add_product(id, layer.down, h, start, rows);
  }

  Products& products_;
  AttentionStep& attention_;
  const DecoderWeights weights_;
  Batch batch_{};
  Pool pool_{};
  int rows_ = 0, hidden_ = 0;
  float *x_ = nullptr, *qkv_ = nullptr, *y_ = nullptr, *gated_ = nullptr, *kept_y_ = nullptr;
  bf16* q_ = nullptr;
  Buffer<float> x_buffer_, kept_buffer_, kept_y_buffer_, qkv_buffer_, y_buffer_, gated_buffer_;
  Buffer<bf16> q_buffer_;
};

}  // namespace sglite
