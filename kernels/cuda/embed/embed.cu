// out[t, h] = table[id(t), h]: a step's tokens become the residual stream. A negative number stands for a token that the step before has
// drawn and the host may not have read: id(t) = tokens[t] >= 0 ? tokens[t] : sampled[-1 - tokens[t]].
// table [vocab, hidden], out [tokens, hidden] bf16. Block = one token, 16 bytes a thread; bound by latency for few tokens, else by memory.
#include "../ptx/ptx.cuh"

struct EmbedArgs {
    const uint4* table;
    const int32_t* tokens;
    const int32_t* sampled;
    uint4* out;
    int32_t row_words;  // of 16 bytes
    int32_t padding;
};
static_assert(sizeof(EmbedArgs) == 40);

extern "C" __global__ void __launch_bounds__(1024) embed(const __grid_constant__ EmbedArgs args) {
    ptx::launch_dependents();
    ptx::grid_dependency_wait();
    const int token = blockIdx.x, named = args.tokens[token];
    const int id = named >= 0 ? named : args.sampled[-1 - named];
    const uint4* from = args.table + static_cast<int64_t>(id) * args.row_words;
    uint4* to = args.out + static_cast<int64_t>(token) * args.row_words;
    for (int i = threadIdx.x; i < args.row_words; i += blockDim.x) to[i] = from[i];
}
