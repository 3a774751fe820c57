// The mailbox's client as two kernels; the protocol is described in kernels/mailbox/layout.h.
//
// Compiled at run time by NVRTC, after a preamble of MBX_* constants (offsets of layout.h) and STATE_* and FAILED_*
// constants (of program.py). Tests compile the very same file with a host compiler, after a shim of the CUDA
// names it uses, and run it against real servers.
//
// Memory. `box.base` is the segment, registered host memory: every access crosses PCIe. `box.state` is GPU
// memory of this client: the epoch counter (so that a replayed graph counts on), the sticky error flag, and per
// slot the epoch it holds and the gates between blocks. Launches of one client follow one another in a stream.
//
// After a failure every launch returns at once, until the host clears the flag: a step always ends.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// By value at each launch; mirrored by program.py. All words are 64 bits wide, so there is no padding.
struct Box {
  u8* base;
  u64* state;
  u64 client_record;  // byte offset of this client's ClientRecord, as are the next five of their regions
  u64 peer_records;   // of the first client of the group
  u64 ready_lines;
  u64 done_lines;
  u64 requests;
  u64 responses;
  u64 request_stride;
  u64 response_stride;
  u64 topk_ids;  // from a RequestHeader, as is the next
  u64 topk_weights;
  u64 hidden_size;
  u64 top_k;
  u64 num_servers;
  u64 num_clients;
  u64 client;
  u64 dtype;        // of hidden states in the mailbox: 1 float32, 2 bfloat16, 3 float16
  u64 deadline_ns;  // of one wait
};

#define PACK_HIDDEN 1u  // what a pack launch does; without PACK_HIDDEN the copy engine brought the hidden states
#define PACK_RING 2u    // routing, header and ready line
#define PACK_CLEAR 4u   // before the ring: the words that stream memory operations wait for
#define WAIT_ANSWERS 1u
#define WAIT_ADD 2u

// --- words that another process or block writes -----------------------------------------------------------

#ifndef MBX_HOST
static __device__ __forceinline__ u64 load_acquire_system(const u64* word) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
static __device__ __forceinline__ u32 load_relaxed_system(const u32* word) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
static __device__ __forceinline__ void store_release_system(u64* word, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
static __device__ __forceinline__ void store_release_system(u32* word, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
static __device__ __forceinline__ u64 load_acquire_device(const u64* word) {
  u64 value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
static __device__ __forceinline__ void store_release_device(u64* word, u64 value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
static __device__ __forceinline__ u64 global_nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
static __device__ __forceinline__ void nap(u32 nanoseconds) { __nanosleep(nanoseconds); }
#endif

// --- pack and ring ----------------------------------------------------------------------------------------

static __device__ __forceinline__ u32 float_bits(float value) { return __float_as_uint(value); }

static __device__ __forceinline__ u16 to_bfloat16(float value) {
  const u32 bits = float_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return u16((bits >> 16) | 0x40u);  // NaN stays one
  return u16((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);                  // to nearest, ties to even
}

static __device__ __forceinline__ float from_bfloat16(u16 bits) { return __uint_as_float(u32(bits) << 16); }

// To nearest, ties to even; infinite from 65520 on, as everywhere: the engine finds rows that are not finite.
static __device__ __forceinline__ u16 to_float16(float value) {
  const u32 bits = float_bits(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return u16(sign | 0x7E00u);   // NaN stays one
  if (magnitude >= 0x477FF000u) return u16(sign | 0x7C00u);  // 65520
  // Below 2^-14 codes are multiples of 2^-24, which is the last bit of a float32 from 1/2 on.
  if (magnitude < 0x38800000u) return u16(sign | (float_bits(__uint_as_float(magnitude) + 0.5f) - 0x3F000000u));
  return u16(sign | ((magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13));
}

static __device__ __forceinline__ float from_float16(u16 bits) {
  const u32 sign = u32(bits & 0x8000u) << 16, magnitude = bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return __uint_as_float(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
  // The exponent's bias of 15 becomes 127 by a factor of 2^112; exact for the smallest numbers, too.
  const float value = __uint_as_float(magnitude << 13) * 5192296858534827628530496329220096.0f;
  return __uint_as_float(sign | float_bits(value));
}

// Spreads `bytes` over all threads of the grid, 16 at a time where both sides allow it.
static __device__ void copy_bytes(u8* target, const u8* source, u64 bytes, u64 thread, u64 threads) {
  u64 done = 0;
  if ((((u64)target | (u64)source) & 15u) == 0) {
    const u64 wide = bytes / 16;
    for (u64 i = thread; i < wide; i += threads) ((uint4*)target)[i] = ((const uint4*)source)[i];
    done = wide * 16;
  }
  for (u64 i = done / 2 + thread; i < bytes / 2; i += threads) ((u16*)target)[i] = ((const u16*)source)[i];
}

// Types as Box::dtype.
static __device__ void copy_converted(u8* target, u64 to, const u8* source, u64 from, u64 count, u64 thread,
                                      u64 threads) {
  for (u64 i = thread; i < count; i += threads) {
    const float value = from == 1   ? ((const float*)source)[i]
                        : from == 2 ? from_bfloat16(((const u16*)source)[i])
                                    : from_float16(((const u16*)source)[i]);
    if (to == 1) {
      ((float*)target)[i] = value;
    } else {
      ((u16*)target)[i] = to == 2 ? to_bfloat16(value) : to_float16(value);
    }
  }
}

// One thread, when all rows of this client are visible to the system.
static __device__ void ring(const Box& box, u32 slot, u32 layer, u32 rows, bool clear) {
  const u64 epoch = box.state[STATE_EPOCH] + 1;
  box.state[STATE_EPOCH] = epoch;
  box.state[STATE_SLOT_EPOCH + slot] = epoch;
  if (box.client == 0) {
    u8* header = box.base + box.requests + slot * box.request_stride;
    *(u32*)(header + MBX_RequestHeader_layer) = layer;
    *(u32*)(header + MBX_RequestHeader_rows) = rows;
    for (u32 i = 0; i < 3; ++i) ((u64*)(header + MBX_RequestHeader_trace_id))[i] = box.state[STATE_TRACE + i];
    *(u32*)(header + MBX_RequestHeader_trace_flags) = (u32)box.state[STATE_TRACE + 3];
    *(u64*)(header + MBX_RequestHeader_epoch) = epoch;
  }
  for (u32 s = 0; clear && s < box.num_servers; ++s) {
    u8* done = box.base + box.done_lines + (slot * box.num_servers + s) * MBX_DoneLine;
    ((u32*)(done + MBX_DoneLine_answered))[box.client] = 0;
  }
  store_release_system((u64*)(box.base + box.ready_lines + (slot * box.num_clients + box.client) * MBX_ReadyLine),
                       epoch);
}

// Writes this client's rows [begin, begin + count) of a request of `rows` rows into `slot`, and rings. The
// arrays start at the first own row; `source_dtype` as Box::dtype.
extern "C" __global__ void pack_and_ring(Box box, const u8* hidden_states, const u8* topk_ids, const u8* topk_weights,
                                         u32 source_dtype, u32 slot, u32 layer, u32 rows, u32 begin, u32 count,
                                         u32 parts) {
  if (box.state[STATE_ERROR] != 0) return;
  const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  const u64 threads = (u64)gridDim.x * blockDim.x;
  u8* request = box.base + box.requests + slot * box.request_stride;
  if (parts & PACK_HIDDEN) {
    const u64 width = box.dtype == 1 ? 4 : 2;
    u8* target = request + MBX_RequestHeader + begin * box.hidden_size * width;
    if (source_dtype == box.dtype) {
      copy_bytes(target, hidden_states, count * box.hidden_size * width, thread, threads);
    } else {
      copy_converted(target, box.dtype, hidden_states, source_dtype, count * box.hidden_size, thread, threads);
    }
  }
  if (!(parts & PACK_RING)) return;
  const u64 row_bytes = box.top_k * 4;
  copy_bytes(request + box.topk_ids + begin * row_bytes, topk_ids, count * row_bytes, thread, threads);
  copy_bytes(request + box.topk_weights + begin * row_bytes, topk_weights, count * row_bytes, thread, threads);
  __syncthreads();
  if (threadIdx.x != 0) return;
  // The barrier put this block's rows before this thread; the ring's release puts them before the ready line.
  // Rows of other blocks come before it by their fence, their arrival and the last one's fence.
  if (gridDim.x > 1) {
    __threadfence_system();
    if (atomicAdd(&box.state[STATE_ARRIVED + slot], 1ull) + 1 != gridDim.x) return;
    box.state[STATE_ARRIVED + slot] = 0;
    __threadfence_system();
  }
  ring(box, slot, layer, rows, (parts & PACK_CLEAR) != 0);
}

// --- wait and add -----------------------------------------------------------------------------------------

// The first report of a step stands; the host and the peers read it. One thread at a time may be here.
static __device__ void report(const Box& box, u32 failure, u32 server, u32 layer, u32 slot, u64 epoch) {
  if (atomicExch(&box.state[STATE_ERROR], 1ull) != 0) return;
  u8* record = box.base + box.client_record;
  *(u32*)(record + MBX_ClientRecord_failed_server) = server;
  *(u32*)(record + MBX_ClientRecord_failed_layer) = layer;
  *(u32*)(record + MBX_ClientRecord_failed_slot) = slot;
  *(u64*)(record + MBX_ClientRecord_failed_epoch) = epoch;
  store_release_system((u32*)(record + MBX_ClientRecord_failure), failure);
}

// Someone else's reason to give up: the host's, a peer's, or the launcher's. FAILED_NONE: there is none.
static __device__ u32 others_reason(const Box& box, u32* server) {
  const u32 abandon = load_relaxed_system((const u32*)(box.base + box.client_record + MBX_ClientRecord_abandon));
  if (abandon != 0) {
    *server = abandon - 1;
    return FAILED_ABANDONED;
  }
  for (u32 c = 0; c < box.num_clients; ++c) {
    const u8* peer = box.base + box.peer_records + c * MBX_ClientRecord;
    if (load_relaxed_system((const u32*)(peer + MBX_ClientRecord_failure)) != 0 && c != box.client) {
      *server = load_relaxed_system((const u32*)(peer + MBX_ClientRecord_failed_server));
      return FAILED_PEER;
    }
  }
  return load_relaxed_system((const u32*)(box.base + MBX_Header_shutdown)) != 0 ? FAILED_SHUT_DOWN : FAILED_NONE;
}

// What an outcome word says about `epoch`: 1: nothing yet; 0: answered; else 1 + a FAILED_* number.
static __device__ u32 judge(u64 outcome, u64 epoch, u64 generation) {
  const u64 mask = (1ull << 40) - 1;
  const u64 ahead = ((outcome >> 24) - epoch) & mask;
  if (ahead != 0) return ahead < (1ull << 39) ? 1 + FAILED_STALE_EPOCH : 1;
  if ((outcome & 0xFF) != 0) return 1 + FAILED_COMPUTE;
  if (generation != 0 && ((outcome >> 8) & 0xFFFF) != (generation & 0xFFFF)) return 1 + FAILED_RESTARTED;
  return 0;
}

// One thread: until `server` has answered the slot's epoch. False after a failure, which it has reported.
static __device__ bool wait_for_server(const Box& box, u32 server, u32 slot, u32 layer) {
  const u64 epoch = box.state[STATE_SLOT_EPOCH + slot];
  const u64 generation = box.state[STATE_GENERATION + server];
  const u8* done = box.base + box.done_lines + (slot * box.num_servers + server) * MBX_DoneLine;
  const u64 start = global_nanoseconds();
  for (u32 looks = 1;; ++looks) {
    const u32 verdict = judge(load_acquire_system((const u64*)(done + MBX_DoneLine_outcome)), epoch, generation);
    if (verdict == 0) return true;
    u32 failure = verdict - 1, about = server;
    // Each look at host memory takes about a microsecond: these are rare, and do not delay an answer.
    if (verdict == 1 && looks % 64 == 0) {
      failure = others_reason(box, &about);
      if (failure == FAILED_NONE && global_nanoseconds() - start > box.deadline_ns) failure = FAILED_DEADLINE;
      if (failure == FAILED_DEADLINE) about = server;
    }
    if (failure != FAILED_NONE) {
      report(box, failure, about, layer, slot, epoch);
      return false;
    }
    nap(verdict == 1 && looks > 256 ? 400 : 40);
  }
}

// Block 0: each warp's first thread waits for its servers; then the gate tells the other blocks.
static __device__ bool wait_for_all(const Box& box, u32 slot, u32 layer) {
  __shared__ u32 failed;
  if (threadIdx.x == 0) failed = box.state[STATE_ERROR] != 0;
  __syncthreads();
  if (blockIdx.x == 0) {
    const u32 warps = (blockDim.x + 31) / 32;
    if (failed == 0 && threadIdx.x % 32 == 0) {
      for (u32 s = threadIdx.x / 32; s < box.num_servers; s += warps) {
        if (!wait_for_server(box, s, slot, layer)) {
          atomicExch(&failed, 1u);
          break;
        }
      }
    }
    __syncthreads();
    if (threadIdx.x == 0 && gridDim.x > 1) {
      store_release_device(&box.state[STATE_GATE + slot], box.state[STATE_SLOT_EPOCH + slot]);
    }
  } else if (threadIdx.x == 0 && failed == 0) {
    const u64 epoch = box.state[STATE_SLOT_EPOCH + slot];
    while (load_acquire_device(&box.state[STATE_GATE + slot]) != epoch) nap(40);
    failed = load_acquire_device(&box.state[STATE_ERROR]) != 0;
  }
  __syncthreads();
  return failed == 0;
}

static __device__ __forceinline__ float4 sum4(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Element i of all answers, added in server order. Loads come first, four at a time: each takes a microsecond
// over PCIe, and an addition between them would make them wait for one another.
template <typename T, typename Sum>
static __device__ __forceinline__ T sum_of_answers(const u8* answers, u64 stride, u64 servers, u64 i, Sum add) {
  T sum = ((const T*)answers)[i];
  for (u64 first = 1; first < servers; first += 4) {
    T part[4];
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
      if (first + j < servers) part[j] = ((const T*)(answers + (first + j) * stride))[i];
    }
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
      if (first + j < servers) sum = add(sum, part[j]);
    }
  }
  return sum;
}

// partial += (answer of server 0 + that of server 1 + ...), in this order for every element.
static __device__ void add_answers(float* partial, const u8* answers, u64 stride, u64 servers, u64 count, u64 thread,
                                   u64 threads) {
  u64 done = 0;
  if ((((u64)partial | (u64)answers | stride) & 15u) == 0) {
    const auto add = [](float4 a, float4 b) { return sum4(a, b); };
    float4* const wide = (float4*)partial;
    for (u64 i = thread; i < count / 4; i += threads) {
      const float4 before = wide[i];
      wide[i] = sum4(before, sum_of_answers<float4>(answers, stride, servers, i, add));
    }
    done = count / 4 * 4;
  }
  const auto add = [](float a, float b) { return a + b; };
  for (u64 i = done + thread; i < count; i += threads) {
    partial[i] += sum_of_answers<float>(answers, stride, servers, i, add);
  }
}

// Adds rows [begin, begin + count) of all servers' answers in `slot` to float32 `partial`, which starts at the
// first of them. `staged`, when not null, holds those rows of every server in GPU memory, one after another.
extern "C" __global__ void wait_and_add(Box box, float* partial, const u8* staged, u32 slot, u32 layer, u32 begin,
                                        u32 count, u32 parts) {
  if (parts & WAIT_ANSWERS) {
    if (!wait_for_all(box, slot, layer)) return;
  } else if (box.state[STATE_ERROR] != 0) {
    return;
  }
  if (!(parts & WAIT_ADD)) return;
  const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  const u64 threads = (u64)gridDim.x * blockDim.x;
  const u64 elements = (u64)count * box.hidden_size;
  if (staged != 0) return add_answers(partial, staged, elements * 4, box.num_servers, elements, thread, threads);
  const u8* first = box.base + box.responses + slot * box.num_servers * box.response_stride + MBX_ResponseHeader +
                    begin * box.hidden_size * 4;
  add_answers(partial, first, box.response_stride, box.num_servers, elements, thread, threads);
}

// --- measuring --------------------------------------------------------------------------------------------

// The asking side of a ping-pong on one word with a process that answers odd numbers with the next even one.
// Writes the nanoseconds of `rounds` round trips after `warm_up` more, or 0 when the other side keeps silent.
extern "C" __global__ void ping_pong(u32* word, u32 warm_up, u32 rounds, u64 deadline_ns, u64* nanoseconds) {
  u64 start = global_nanoseconds();
  const u64 give_up = start + deadline_ns;
  for (u32 i = 0; i < warm_up + rounds; ++i) {
    if (i == warm_up) start = global_nanoseconds();
    store_release_system(word, 2 * i + 1);
    for (u32 looks = 1; load_relaxed_system(word) != 2 * i + 2; ++looks) {
      if (looks % 1024 != 0 || global_nanoseconds() < give_up) continue;
      *nanoseconds = 0;
      return;
    }
  }
  *nanoseconds = global_nanoseconds() - start;
}
