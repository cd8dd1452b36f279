// ik_llama.cpp for peer_engines.py: its calls that take structs, as functions of plain values.
//
// Those structs change from commit to commit, so the compiler reads them from the header of the library that is linked.
// All other calls peer_engines.py makes itself. README.md says how to build this and the library.

#include <cstdint>
#include <cstdio>

#include "llama.h"

extern "C" {

const char *ik_commit() { return IK_COMMIT; }

// The model with its weights repacked, as `-rtr` asks for; null if it cannot be loaded. Only errors are printed.
llama_model *ik_load(const char *file) {
    llama_log_set([](ggml_log_level level, const char *text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
    }, nullptr);
    llama_backend_init();
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = 0;
    params.use_mmap = false;
    params.repack_tensors = true;
    return llama_model_load_from_file(file, params);
}

// A context of `size` tokens that takes at most `chunk` in a pass; null if there cannot be one.
llama_context *ik_context(llama_model *model, uint32_t size, uint32_t chunk, uint32_t threads) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = size;
    params.n_batch = params.n_ubatch = chunk;
    params.n_threads = params.n_threads_batch = threads;
    params.flash_attn = true;
    return llama_init_from_model(model, params);
}

// What llama_decode returns for `count` tokens at positions from `start` on, when it has ended.
int32_t ik_decode(llama_context *context, const int32_t *ids, int32_t count, int32_t start, bool all_logits) {
    llama_batch batch = llama_batch_init(count, 0, 1);
    batch.n_tokens = count;
    for (int32_t i = 0; i < count; i++) {
        batch.token[i] = ids[i];
        batch.pos[i] = start + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = all_logits || i == count - 1;
    }
    const int32_t failed = llama_decode(context, batch);
    llama_synchronize(context);
    llama_batch_free(batch);
    return failed;
}
}
