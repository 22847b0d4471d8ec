// The attention of a whole step, cut into items that workers take one by one.
//
// Rows with several new tokens: an item is up to 64 query vectors of one key/value head over all their chunks.
// Rows with one new token: where rows have their first pages in common, an item folds those chunks once for up to 16
// query vectors of all of them; then each row goes on alone. Where there are few such rows, each chunk is an item and
// the chunks' results are folded afterwards. All three fold the same chunks in the same order.
#pragma once

#include "attention.h"
#include "team.h"

namespace sglite {

constexpr int kSpan = 4;  // tiles of queries that meet a chunk together

struct AttentionItem {
  int row;          // or the group of rows that share a prefix
  int head;         // key/value head
  int first, last;  // query vectors (several new tokens), chunk (split), or vectors of the group
};

// Rows that have one new token and their first `chunks` chunks in common.
struct SharedPrefix {
  std::vector<int> rows;
  int chunks;
};

class AttentionStep {
 public:
  struct Scratch {
    ChunkWorker worker;
    Chunk chunks[2];  // the one at work and the next
    Queries queries[kSpan];
    State states[kSpan];
  };

  AttentionStep(Team& team, bool amx) : team_(team), amx_(amx) {
    for (int i = 0; i < team.size(); ++i) scratch_.emplace_back(new Scratch);
  }

  // Before the layers, by one thread.
  void plan(const Batch& batch, const AttentionShape& shape, bool blocked) {
    batch_ = batch;
    shape_ = shape;
    many_.clear();
    alone_.clear();
    together_.clear();
    split_.clear();
    groups_.clear();
    shared_.assign(batch.rows, 0);
    std::vector<int> single;
    for (int row = 0; row < batch.rows; ++row) {
      if (batch.new_tokens(row) == 1 && shape.ratio() <= kQueries) {
        single.push_back(row);
      } else {
        plan_many(row);
      }
    }
    plan_single(single, blocked);
  }

  // On every worker. q: bf16 [T][H][D]; out: fp32 [T][H][D].
  void run(int id, const LayerPool& pool, const bf16* q, float* out, int window) {
    Scratch& scratch = *scratch_[id];
    AttentionShape shape = shape_;
    shape.window = window;
    scratch.worker.configure(shape, amx_);
    if (!together_.empty()) {
      each(together_, [&](const AttentionItem& item) { fold_shared(scratch, pool, q, item); });
    }
    if (!split_.empty()) {
      each(split_, [&](const AttentionItem& item) { fold_part(scratch, pool, q, item, window); });
    }
    if (!many_.empty()) {
      each(many_, [&](const AttentionItem& item) { attend_many(scratch, pool, q, out, item, window); });
    }
    if (splitting_) {
      each(alone_, [&](const AttentionItem& item) { join_parts(scratch, out, item); });
    } else if (!alone_.empty()) {
      const int count = static_cast<int>(alone_.size());
      team_.share(count, std::min(count, 8 * team_.size()), [&](int begin, int end) {
        attend_alone(scratch, pool, q, out, begin, end, window);
      });
    }
  }

 private:
  template <class F>
  void each(const std::vector<AttentionItem>& items, const F& work) {
    const int count = static_cast<int>(items.size());
    team_.share(count, count, [&](int begin, int end) {
      for (int i = begin; i < end; ++i) work(items[i]);
    });
  }

  // -------------------------------------------------------------------------------------------------------- planning

  void plan_many(int row) {
    const int vectors = batch_.new_tokens(row) * shape_.ratio(), span = kSpan * kQueries;
    for (int last = vectors; last > 0; last = (last - 1) / span * span) {  // the longest first
      for (int head = 0; head < shape_.kv_heads; ++head) many_.push_back({row, head, (last - 1) / span * span, last});
    }
  }

  void plan_single(const std::vector<int>& rows, bool blocked) {
    const int items = static_cast<int>(rows.size()) * shape_.kv_heads;
    const bool few = items < 4 * team_.size() && many_.empty();
    int chunks = 1;
    for (int row : rows) chunks = std::max(chunks, ceil_div(batch_.kv_lengths[row], kChunk));
    splitting_ = few && team_.size() > 1 && chunks > 1;
    if (splitting_) {
      plan_split(rows, chunks);
    } else if (blocked && shape_.window == 0 && rows.size() > 1) {
      plan_shared(rows);
    }
    for (int row : rows) {
      for (int head = 0; head < shape_.kv_heads; ++head) alone_.push_back({row, head, 0, shape_.ratio()});
    }
  }

  void plan_split(const std::vector<int>& rows, int chunks) {
    chunks_ = chunks;
    parts_.reserve(static_cast<size_t>(batch_.rows) * shape_.kv_heads * chunks);
    for (int row : rows) {
      for (int chunk = 0; chunk < ceil_div(batch_.kv_lengths[row], kChunk); ++chunk) {
        for (int head = 0; head < shape_.kv_heads; ++head) split_.push_back({row, head, chunk, chunk});
      }
    }
  }

  void plan_shared(const std::vector<int>& rows) {
    for (int row : rows) join_group(row);
    groups_.erase(std::remove_if(groups_.begin(), groups_.end(), [](const SharedPrefix& g) { return g.rows.size() < 2; }),
                  groups_.end());
    for (size_t g = 0; g < groups_.size(); ++g) {
      for (int row : groups_[g].rows) shared_[row] = groups_[g].chunks;
      const int vectors = static_cast<int>(groups_[g].rows.size()) * shape_.ratio();
      for (int first = 0; first < vectors; first += kQueries) {
        for (int head = 0; head < shape_.kv_heads; ++head) {
          together_.push_back({static_cast<int>(g), head, first, std::min(first + kQueries, vectors)});
        }
      }
    }
    if (!together_.empty()) carried_.reserve(static_cast<size_t>(batch_.rows) * shape_.heads);
  }

  // A row joins the first group whose prefix it has; a group of one gives way to what two have in common.
  void join_group(int row) {
    for (SharedPrefix& group : groups_) {
      const int common = common_chunks(group.rows[0], row);
      if (common > 0 && (group.rows.size() == 1 || common >= group.chunks)) {
        if (group.rows.size() == 1) group.chunks = common;
        group.rows.push_back(row);
        return;
      }
    }
    groups_.push_back({{row}, 0});
  }

  int common_chunks(int a, int b) const {
    const int32_t *pa = pages_of(a), *pb = pages_of(b);
    const int whole = std::min(batch_.kv_lengths[a], batch_.kv_lengths[b]) / kChunk * kChunk;
    int same = 0;
    while (same < whole && pa[same / batch_.page_size] == pb[same / batch_.page_size]) same += batch_.page_size;
    return std::min(same, whole) / kChunk;
  }

  const int32_t* pages_of(int row) const { return batch_.page_table + static_cast<size_t>(row) * batch_.pages_per_row; }

  // ------------------------------------------------------------------------------------------------------- execution

  // Query vector n of a row's key/value head: token n / ratio, head n % ratio of the ratio that share keys.
  void gather(const bf16* q, int token, int position, int head, int n, int window, Queries& queries, int at) const {
    const int dim = shape_.head_dim;
    const size_t from = (static_cast<size_t>(token) * shape_.heads + head * shape_.ratio() + n % shape_.ratio()) * dim;
    std::memcpy(queries.q + at * dim, q + from, dim * sizeof(bf16));
    queries.limit[at] = position + 1;
    queries.first[at] = window > 0 ? std::max(0, position + 1 - window) : 0;
  }

  void gather_row(const bf16* q, int row, int head, int first, int last, int window, Queries& queries) const {
    queries.count = last - first;
    const int start = batch_.kv_lengths[row] - batch_.new_tokens(row);
    for (int n = first; n < last; ++n) {
      const int token = n / shape_.ratio();
      gather(q, batch_.indptr[row] + token, start + token, head, n, window, queries, n - first);
    }
  }

  void attend_many(Scratch& s, const LayerPool& pool, const bf16* q, float* out, const AttentionItem& item, int window) {
    const int tiles = ceil_div(item.last - item.first, kQueries);
    for (int t = 0; t < tiles; ++t) {
      const int first = item.first + t * kQueries;
      gather_row(q, item.row, item.head, first, std::min(first + kQueries, item.last), window, s.queries[t]);
      s.states[t].clear(shape_.head_dim);
    }
    Chunk& chunk = s.chunks[0];
    const int start = s.queries[0].lowest() / kChunk * kChunk, stop = s.queries[tiles - 1].highest();
    for (int at = start; at < stop; at += kChunk) {
      s.worker.locate(pool, pages_of(item.row), batch_.page_size, batch_.kv_lengths[item.row], at, item.head, chunk);
      for (int t = 0; t < tiles; ++t) {
        if (at + kChunk > s.queries[t].lowest()) s.worker.fold(s.queries[t], chunk, s.states[t]);
      }
    }
    for (int t = 0; t < tiles; ++t) finish(item, item.first + t * kQueries, s.queries[t].count, s.states[t], out);
  }

  void fold_shared(Scratch& s, const LayerPool& pool, const bf16* q, const AttentionItem& item) {
    const SharedPrefix& group = groups_[item.row];
    Queries& queries = s.queries[0];
    queries.count = item.last - item.first;
    for (int n = item.first; n < item.last; ++n) {
      const int row = group.rows[n / shape_.ratio()];
      gather(q, batch_.indptr[row], batch_.kv_lengths[row] - 1, item.head, n, 0, queries, n - item.first);
    }
    s.states[0].clear(shape_.head_dim);
    const int leader = group.rows[0];
    Chunk& chunk = s.chunks[0];
    for (int c = 0; c < group.chunks; ++c) {
      s.worker.locate(pool, pages_of(leader), batch_.page_size, batch_.kv_lengths[leader], c * kChunk, item.head, chunk);
      s.worker.fold(queries, chunk, s.states[0]);
    }
    for (int n = item.first; n < item.last; ++n) {
      const int row = group.rows[n / shape_.ratio()], head = item.head * shape_.ratio() + n % shape_.ratio();
      carry(s.states[0], n - item.first, carried_.get()[static_cast<size_t>(row) * shape_.heads + head]);
    }
  }

  void fold_part(Scratch& s, const LayerPool& pool, const bf16* q, const AttentionItem& item, int window) {
    gather_row(q, item.row, item.head, 0, shape_.ratio(), window, s.queries[0]);
    State& part = parts_.get()[part_index(item.row, item.head, item.first)];
    part.clear(shape_.head_dim);
    Chunk& chunk = s.chunks[0];
    const int start = item.first * kChunk;
    s.worker.locate(pool, pages_of(item.row), batch_.page_size, batch_.kv_lengths[item.row], start, item.head, chunk);
    s.worker.fold(s.queries[0], chunk, part);
  }

  // What chunk-parallel work left of a row, in order.
  void join_parts(Scratch& s, float* out, const AttentionItem& item) const {
    State& state = s.states[0];
    state.clear(shape_.head_dim);
    for (int c = 0; c < ceil_div(batch_.kv_lengths[item.row], kChunk); ++c) {
      const State& part = parts_.get()[part_index(item.row, item.head, c)];
      s.worker.merge(part.peak, part.sum, part.values, shape_.ratio(), state);
    }
    finish(item, 0, shape_.ratio(), state, out);
  }

  // Items [begin, end) of single rows as one chain of chunks, so that each chunk's memory is called for before its turn.
  void attend_alone(Scratch& s, const LayerPool& pool, const bf16* q, float* out, int begin, int end, int window) {
    Place now{begin, first_chunk(begin, window)};
    locate(s, pool, now, 0);
    for (int turn = 0; now.item < end; ++turn) {
      const AttentionItem& item = alone_[now.item];
      const Place next = after(now, window);
      const bool more = next.item < end;
      if (more) locate(s, pool, next, (turn + 1) % 2);
      if (now.chunk == first_chunk(now.item, window)) begin_row(s, q, item, window);
      s.worker.fold(s.queries[0], s.chunks[turn % 2], s.states[0], more ? &s.chunks[(turn + 1) % 2] : nullptr);
      if (next.item != now.item) finish(item, 0, shape_.ratio(), s.states[0], out);
      now = next;
    }
  }

  struct Place {
    int item, chunk;
  };

  int first_chunk(int item, int window) const {
    if (item >= static_cast<int>(alone_.size())) return 0;
    const int row = alone_[item].row;
    return window > 0 ? std::max(0, batch_.kv_lengths[row] - window) / kChunk : shared_[row];
  }

  Place after(const Place& place, int window) const {
    const bool more = (place.chunk + 1) * kChunk < batch_.kv_lengths[alone_[place.item].row];
    return more ? Place{place.item, place.chunk + 1} : Place{place.item + 1, first_chunk(place.item + 1, window)};
  }

  void locate(Scratch& s, const LayerPool& pool, const Place& place, int which) const {
    const AttentionItem& item = alone_[place.item];
    s.worker.locate(pool, pages_of(item.row), batch_.page_size, batch_.kv_lengths[item.row], place.chunk * kChunk, item.head,
                    s.chunks[which]);
  }

  void begin_row(Scratch& s, const bf16* q, const AttentionItem& item, int window) const {
    gather_row(q, item.row, item.head, 0, shape_.ratio(), window, s.queries[0]);
    s.states[0].clear(shape_.head_dim);
    if (shared_[item.row] > 0) take_over(item.row, item.head, s.states[0]);
  }

  size_t part_index(int row, int head, int chunk) const {
    return (static_cast<size_t>(row) * shape_.kv_heads + head) * chunks_ + chunk;
  }

  // One query's state between the shared part and the row's own.
  struct Carried {
    float peak, sum;
    float values[kMaxDim];
  };

  void carry(const State& state, int at, Carried& to) const {
    to.peak = state.peak[at];
    to.sum = state.sum[at];
    for (int part = 0; part < shape_.head_dim / kLanes; ++part) {
      std::copy_n(state.values[part][at], kLanes, to.values + part * kLanes);
    }
  }

  void take_over(int row, int kv_head, State& state) const {
    for (int n = 0; n < shape_.ratio(); ++n) {
      const Carried& from = carried_.get()[static_cast<size_t>(row) * shape_.heads + kv_head * shape_.ratio() + n];
      state.peak[n] = from.peak;
      state.sum[n] = from.sum;
      for (int part = 0; part < shape_.head_dim / kLanes; ++part) {
        std::copy_n(from.values + part * kLanes, kLanes, state.values[part][n]);
      }
    }
  }

  void finish(const AttentionItem& item, int first, int count, const State& state, float* out) const {
    const int dim = shape_.head_dim, ratio = shape_.ratio();
    for (int i = 0; i < count; ++i) {
      const int token = batch_.indptr[item.row] + (first + i) / ratio, head = item.head * ratio + (first + i) % ratio;
      float* to = out + (static_cast<size_t>(token) * shape_.heads + head) * dim;
      const __m512 share = _mm512_set1_ps(1.0f / state.sum[i]);
      for (int d = 0; d < dim; d += kLanes) {
        _mm512_storeu_ps(to + d, _mm512_mul_ps(_mm512_load_ps(state.values[d / kLanes][i]), share));
      }
    }
  }

  Team& team_;
  const bool amx_;
  Batch batch_{};
  AttentionShape shape_{};
  bool splitting_ = false;
  int chunks_ = 0;
  std::vector<AttentionItem> many_, alone_, together_, split_;
  std::vector<SharedPrefix> groups_;
  std::vector<int> shared_;
  Buffer<State> parts_;
  Buffer<Carried> carried_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
};

}  // namespace sglite
