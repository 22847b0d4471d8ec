// The C interface that Python calls through ctypes. Every call takes the context's lock: one step at a time.

#include <mutex>

#include "decoder.h"
#include "sample.h"

namespace sglite {

struct Context {
  Context(int threads, bool amx) : team(threads), products(team, amx), attention(team, amx) {
    for (int i = 0; i < threads; ++i) choosers.emplace_back(new Chooser);
  }

  Team team;
  Products products;
  AttentionStep attention;
  std::vector<std::unique_ptr<Chooser>> choosers;  // one for each worker
  Buffer<float> y;
  std::mutex lock;
};

struct Model {
  Context& context;
  std::vector<LayerWeights> layers;
  Decoder decoder;
};

}  // namespace sglite

using namespace sglite;

extern "C" {

// 1 where this build has tile instructions and the system lets this process use them.
int32_t sglite_has_amx() { return SGLITE_AMX && amx_granted(); }

void* sglite_open(int32_t threads, int32_t amx) { return new Context(threads, amx != 0); }
void sglite_close(void* context) { delete static_cast<Context*>(context); }

// The matrices' memory stays the caller's and must outlive the decoder.
void* sglite_decoder(void* context, const DecoderWeights* weights) {
  auto& c = *static_cast<Context*>(context);
  std::vector<LayerWeights> layers(weights->layer, weights->layer + weights->layers);
  const LayerWeights* data = layers.data();
  DecoderWeights copy = *weights;
  copy.layer = data;
  return new Model{c, std::move(layers), Decoder(c.products, c.attention, copy)};
}
void sglite_decoder_free(void* model) { delete static_cast<Model*>(model); }

void sglite_decoder_run(void* model, const Batch* batch, const Pool* pool, float* hidden) {
  auto& m = *static_cast<Model*>(model);
  std::lock_guard<std::mutex> guard(m.context.lock);
  m.decoder.run(*batch, *pool, hidden);
}

// y [rows][N] = x [rows][K] W^T; x_stride in elements; both fp32, or both bf16 where `half` is set.
void sglite_linear(void* context, const Matrix* w, const void* x, int64_t x_stride, int32_t rows, void* y, int32_t half) {
  auto& c = *static_cast<Context*>(context);
  std::lock_guard<std::mutex> guard(c.lock);
  const int columns = w->columns, width = w->rows;
  c.team.run([&](int id) {
    c.products.enter();
    for (int start = 0; start < rows; start += kBlockRows) {
      const int count = std::min(kBlockRows, rows - start);
      const Activations& encoded = c.products.encode(id, *w, count, [&](int row, float* scratch) -> const float* {
        const int64_t at = (start + row) * x_stride;
        if (half == 0) return static_cast<const float*>(x) + at;
        from_bf16(static_cast<const bf16*>(x) + at, columns, scratch);
        return scratch;
      });
      c.products.multiply_all(id, *w, encoded, count, [&](int row, int panel, __m512 value) {
        const size_t at = static_cast<size_t>(start + row) * width + panel * kLanes;
        const __mmask16 lanes = first_lanes(width - panel * kLanes);
        if (half != 0) {
          _mm256_mask_storeu_epi16(static_cast<bf16*>(y) + at, lanes, narrow(value));
        } else {
          _mm512_mask_storeu_ps(static_cast<float*>(y) + at, lanes, value);
        }
      });
    }
    c.products.leave();
  });
}

// y: fp32 [count][K], the rows of W that ids name.
void sglite_rows(const Matrix* w, const int64_t* ids, int32_t count, float* y) {
  for (int i = 0; i < count; ++i) unpack_row(*w, ids[i], y + static_cast<size_t>(i) * w->columns);
}

// k, v: bf16 [tokens][G][D] with `k_stride` and `v_stride` elements from token to token.
void sglite_write_kv(void* context, const Pool* pool, int32_t layer, const bf16* k, const bf16* v, int64_t k_stride,
                     int64_t v_stride, const int64_t* slots, int32_t tokens) {
  auto& c = *static_cast<Context*>(context);
  std::lock_guard<std::mutex> guard(c.lock);
  const LayerPool target(*pool, layer);
  const int dim = pool->head_dim;
  for (int t = 0; t < tokens; ++t) {
    for (int head = 0; head < pool->kv_heads; ++head) {
      target.write(slots[t], head, k + t * k_stride + head * dim, v + t * v_stride + head * dim);
    }
  }
}

// q: bf16 [T][H][D] -> out: bf16 of the same shape.
void sglite_attend(void* context, const Pool* pool, int32_t layer, const Batch* batch, const AttentionShape* shape,
                   const bf16* q, bf16* out) {
  auto& c = *static_cast<Context*>(context);
  std::lock_guard<std::mutex> guard(c.lock);
  const size_t count = static_cast<size_t>(shape->heads) * shape->head_dim;
  float* y = c.y.reserve(batch->tokens * count);
  c.attention.plan(*batch, *shape, pool->blocked != 0);
  c.team.run([&](int id) {
    c.products.enter_attention();
    c.attention.run(id, LayerPool(*pool, layer), q, y, shape->window);
    c.products.leave();
    c.team.share(batch->tokens, c.products.pieces(batch->tokens), [&](int begin, int end) { to_bf16(y + begin * count, (end - begin) * count, out + begin * count); });
  });
}

// ids[r] = the token that draw r chooses among those mask row r allows (-1: none are), values[r] the largest allowed logit.
// `mask` and `draws` may be null: everything is allowed, the likeliest is chosen.
void sglite_choose(void* context, const float* logits, const int32_t* mask, int64_t mask_stride, const Draw* draws,
                   int32_t rows, int32_t width, int64_t* ids, float* values) {
  auto& c = *static_cast<Context*>(context);
  std::lock_guard<std::mutex> guard(c.lock);
  const Draw likeliest{0, -1, 1, 0, 0};
  c.team.run([&](int id) {
    c.team.share(rows, rows, [&](int begin, int end) {
      for (int r = begin; r < end; ++r) {
        const float* row = logits + static_cast<size_t>(r) * width;
        const Best best = c.choosers[id]->choose(row, mask ? mask + r * mask_stride : nullptr, width, draws ? draws[r] : likeliest);
        ids[r] = best.index;
        values[r] = best.value;
      }
    });
  });
}

}  // extern "C"
