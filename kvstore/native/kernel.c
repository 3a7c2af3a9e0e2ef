/* Copies and checksums of many pieces of memory in one call: xxh3-64 (seed 0), fused with the copy.
 *
 * Written after the published description of XXH3; the tests compare it with the xxhash library. The caller owns all tables and
 * memory. Every table is checked before the first byte moves.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { STRIPE = 64, SECRET_BYTES = 192, BLOCK_STRIPES = (SECRET_BYTES - STRIPE) / 8, AHEAD = 1024, SHORT = 240, LONG = 1 << 20 };
enum { MOST_THREADS = 64, SHARES = 8 };
enum { VERSION = 2 }; /* of the exported functions and their arguments; changes together with VERSION in c_kernel.py */
enum { CACHED, STREAMED, STREAMED_QUARTERS };
enum { DONE = 0, OUT_OF_RANGE = 1, OVERLAP = 2, BAD_SHAPE = 3 };

static const uint64_t P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D;
static const uint64_t P64_1 = 0x9E3779B185EBCA87, P64_2 = 0xC2B2AE3D27D4EB4F, P64_3 = 0x165667B19E3779F9;
static const uint64_t P64_4 = 0x85EBCA77C2B2AE63, P64_5 = 0x27D4EB2F165667C5;

static const uint8_t SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
static _Alignas(64) uint64_t START_LANES[8];
#define START ((const uint8_t *)START_LANES)

static uint64_t read64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t read32(const uint8_t *at)
{
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t folded(uint64_t a, uint64_t b)
{
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t avalanche(uint64_t h)
{
    h ^= h >> 37;
    h *= 0x165667919E3779F9;
    return h ^ h >> 32;
}

static uint64_t avalanche_short(uint64_t h)
{
    h = (h ^ h >> 33) * P64_2;
    h = (h ^ h >> 29) * P64_3;
    return h ^ h >> 32;
}

static uint64_t mixed(const uint8_t *in, const uint8_t *key)
{
    return folded(read64(in) ^ read64(key), read64(in + 8) ^ read64(key + 8));
}

static uint64_t merged(const uint64_t *lanes, uint64_t length)
{
    uint64_t h = length * P64_1;
    for (int i = 0; i < 4; i++)
        h += folded(lanes[2 * i] ^ read64(SECRET + 11 + 16 * i), lanes[2 * i + 1] ^ read64(SECRET + 19 + 16 * i));
    return avalanche(h);
}

/* xxh3-64 of at most 240 bytes. */
static uint64_t hash_short(const uint8_t *in, size_t length)
{
    if (length == 0)
        return avalanche_short(read64(SECRET + 56) ^ read64(SECRET + 64));
    if (length <= 3) {
        const uint64_t word = (uint64_t)in[0] << 16 | (uint64_t)in[length >> 1] << 24 | in[length - 1] | length << 8;
        return avalanche_short(word ^ (read32(SECRET) ^ read32(SECRET + 4)));
    }
    if (length <= 8) {
        uint64_t h = (read32(in + length - 4) + (read32(in) << 32)) ^ (read64(SECRET + 8) ^ read64(SECRET + 16));
        h ^= (h << 49 | h >> 15) ^ (h << 24 | h >> 40);
        h *= 0x9FB21C651E98DF25;
        h ^= (h >> 35) + length;
        h *= 0x9FB21C651E98DF25;
        return h ^ h >> 28;
    }
    if (length <= 16) {
        const uint64_t low = read64(in) ^ (read64(SECRET + 24) ^ read64(SECRET + 32));
        const uint64_t high = read64(in + length - 8) ^ (read64(SECRET + 40) ^ read64(SECRET + 48));
        return avalanche(length + __builtin_bswap64(low) + high + folded(low, high));
    }
    uint64_t h = length * P64_1;
    if (length <= 128) {
        for (int i = (int)(length - 1) / 32; i >= 0; i--)
            h += mixed(in + 16 * i, SECRET + 32 * i) + mixed(in + length - 16 * (i + 1), SECRET + 32 * i + 16);
        return avalanche(h);
    }
    for (int i = 0; i < 8; i++)
        h += mixed(in + 16 * i, SECRET + 16 * i);
    h = avalanche(h);
    for (int i = 8; i < (int)(length / 16); i++)
        h += mixed(in + 16 * i, SECRET + 16 * (i - 8) + 3);
    return avalanche(h + mixed(in + length - 16, SECRET + 136 - 17));
}

/* --- one implementation of long inputs per instruction set -------------------------------------------------------------------- */

typedef struct {
    uint64_t low, high;
} Pair;

static Pair pair_load(const uint8_t *at) { return (Pair){read64(at), read64(at + 8)}; }
static void pair_store(uint8_t *at, Pair value) { memcpy(at, &value, sizeof value); }
static uint64_t scrambled(uint64_t acc, uint64_t key) { return ((acc ^ acc >> 47) ^ key) * P32_1; }

#define NAME(x) portable_##x
#define TARGET
#define VECTOR Pair
#define WIDTH 16
#define LOAD(at) pair_load(at)
#define STORE(at, value) pair_store(at, value)
#define STREAM(at, value) pair_store(at, value)
#define STREAM_QUARTERS(at, value) pair_store(at, value)
#define XOR(a, b) ((Pair){(a).low ^ (b).low, (a).high ^ (b).high})
#define ADD(a, b) ((Pair){(a).low + (b).low, (a).high + (b).high})
#define MULTIPLY_LOW_HIGH(a) ((Pair){(uint64_t)(uint32_t)(a).low * ((a).low >> 32), (uint64_t)(uint32_t)(a).high * ((a).high >> 32)})
#define SWAP(a) ((Pair){(a).high, (a).low})
#define SCRAMBLE(a, key) ((Pair){scrambled((a).low, (key).low), scrambled((a).high, (key).high)})
#include "lanes.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

static void stream_quarter(uint8_t *at, __m128i value) { _mm_stream_si128((__m128i *)at, value); }

#define NAME(x) avx2_##x
#define TARGET __attribute__((target("avx2")))
#define VECTOR __m256i
#define WIDTH 32
#define LOAD(at) _mm256_loadu_si256((const __m256i *)(at))
#define STORE(at, value) _mm256_storeu_si256((__m256i *)(at), value)
#define STREAM(at, value) _mm256_stream_si256((__m256i *)(at), value)
TARGET static void avx2_stream_quarters(uint8_t *at, __m256i value)
{
    stream_quarter(at, _mm256_castsi256_si128(value));
    stream_quarter(at + 16, _mm256_extracti128_si256(value, 1));
}
#define STREAM_QUARTERS(at, value) avx2_stream_quarters(at, value)
#define XOR(a, b) _mm256_xor_si256(a, b)
#define ADD(a, b) _mm256_add_epi64(a, b)
#define MULTIPLY_LOW_HIGH(a) _mm256_mul_epu32(a, _mm256_srli_epi64(a, 32))
#define SWAP(a) _mm256_shuffle_epi32(a, 0x4E)
TARGET static __m256i avx2_scramble(__m256i acc, __m256i key)
{
    const __m256i prime = _mm256_set1_epi32((int)0x9E3779B1);
    const __m256i x = XOR(XOR(acc, _mm256_srli_epi64(acc, 47)), key);
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
    return ADD(_mm256_mul_epu32(x, prime), _mm256_slli_epi64(high, 32));
}
#define SCRAMBLE(a, key) avx2_scramble(a, key)
#include "lanes.h"

/* Hashes what is in a cache about 1.6 times as fast as AVX2. From memory both are as fast as the memory. */
#define NAME(x) avx512_##x
#define TARGET __attribute__((target("avx512f")))
#define VECTOR __m512i
#define WIDTH 64
#define LOAD(at) _mm512_loadu_si512(at)
#define STORE(at, value) _mm512_storeu_si512(at, value)
#define STREAM(at, value) _mm512_stream_si512((__m512i *)(at), value)
TARGET static void avx512_stream_quarters(uint8_t *at, __m512i value)
{
    stream_quarter(at, _mm512_extracti32x4_epi32(value, 0));
    stream_quarter(at + 16, _mm512_extracti32x4_epi32(value, 1));
    stream_quarter(at + 32, _mm512_extracti32x4_epi32(value, 2));
    stream_quarter(at + 48, _mm512_extracti32x4_epi32(value, 3));
}
#define STREAM_QUARTERS(at, value) avx512_stream_quarters(at, value)
#define XOR(a, b) _mm512_xor_si512(a, b)
#define ADD(a, b) _mm512_add_epi64(a, b)
#define MULTIPLY_LOW_HIGH(a) _mm512_mul_epu32(a, _mm512_srli_epi64(a, 32))
#define SWAP(a) _mm512_shuffle_epi32(a, _MM_PERM_BADC)
TARGET static __m512i avx512_scramble(__m512i acc, __m512i key)
{
    const __m512i prime = _mm512_set1_epi32((int)0x9E3779B1);
    const __m512i x = XOR(XOR(acc, _mm512_srli_epi64(acc, 47)), key);
    const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), prime);
    return ADD(_mm512_mul_epu32(x, prime), _mm512_slli_epi64(high, 32));
}
#define SCRAMBLE(a, key) avx512_scramble(a, key)
#include "lanes.h"

static void fence(void) { _mm_sfence(); }

enum { YMM_STATE = 0x06, ZMM_STATE = 0xE6, AVX512F_BIT = 1 << 16 };

/* Whether processor and kernel support a feature (a bit of EBX in leaf 7) that uses the given registers. Not by
 * __builtin_cpu_supports, which some linkers do not know. */
static int has_feature(unsigned bit, unsigned state)
{
    unsigned a, b, c, d, enabled, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return 0;
    __asm__("xgetbv" : "=a"(enabled), "=d"(high) : "c"(0));
    return (enabled & state) == state && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit);
}

#elif defined(__aarch64__)
#include <arm_neon.h>

#define NAME(x) neon_##x
#define TARGET
#define VECTOR uint64x2_t
#define WIDTH 16
#define LOAD(at) vreinterpretq_u64_u8(vld1q_u8(at))
#define STORE(at, value) vst1q_u8(at, vreinterpretq_u8_u64(value))
#define STREAM(at, value) vst1q_u8(at, vreinterpretq_u8_u64(value))
#define STREAM_QUARTERS(at, value) vst1q_u8(at, vreinterpretq_u8_u64(value))
#define XOR(a, b) veorq_u64(a, b)
#define ADD(a, b) vaddq_u64(a, b)
#define MULTIPLY_LOW_HIGH(a) vmull_u32(vmovn_u64(a), vshrn_n_u64(a, 32))
#define SWAP(a) vextq_u64(a, a, 1)
static uint64x2_t neon_scramble(uint64x2_t acc, uint64x2_t key)
{
    const uint32x2_t prime = vdup_n_u32(0x9E3779B1);
    const uint64x2_t x = veorq_u64(veorq_u64(acc, vshrq_n_u64(acc, 47)), key);
    const uint64x2_t high = vmull_u32(vshrn_n_u64(x, 32), prime);
    return vmlal_u32(vshlq_n_u64(high, 32), vmovn_u64(x), prime);
}
#define SCRAMBLE(a, key) neon_scramble(a, key)
#include "lanes.h"

static void fence(void) {}
#else
static void fence(void) {}
#endif

/* --- choice of the instruction set ------------------------------------------------------------------------------------------------ */

typedef uint64_t (*LongHash)(const uint8_t *in, uint8_t *out, size_t length, int mode);
typedef void (*Copy)(uint8_t *to, const uint8_t *from, size_t length, int mode);

typedef struct {
    const char *name;
    LongHash hash;
    Copy copy;
} Kernel;

static const Kernel KERNELS[] = {
#if defined(__x86_64__)
    {"avx512", avx512_long, avx512_copy},
    {"avx2", avx2_long, avx2_copy},
#elif defined(__aarch64__)
    {"neon", neon_long, neon_copy},
#endif
    {"portable", portable_long, portable_copy},
};
enum { KERNEL_COUNT = sizeof KERNELS / sizeof *KERNELS };
static const Kernel *kernel;

static int supported(const Kernel *candidate)
{
#if defined(__x86_64__)
    if (candidate->hash == avx512_long)
        return has_feature(AVX512F_BIT, ZMM_STATE);
    if (candidate->hash == avx2_long)
        return has_feature(bit_AVX2, YMM_STATE);
#endif
    return candidate->name != NULL;
}

int kvn_version(void) { return VERSION; }

/* Name of a supported kernel, the fastest first; NULL past the last one. */
const char *kvn_kernel(unsigned position)
{
    for (int i = 0; i < KERNEL_COUNT; i++)
        if (supported(&KERNELS[i]) && position-- == 0)
            return KERNELS[i].name;
    return NULL;
}

/* Use a kernel by name; not while other calls run. Returns whether this processor supports it. */
int kvn_use(const char *name)
{
    for (int i = 0; i < KERNEL_COUNT; i++)
        if (supported(&KERNELS[i]) && strcmp(KERNELS[i].name, name) == 0) {
            kernel = &KERNELS[i];
            return 1;
        }
    return 0;
}

__attribute__((constructor)) static void choose(void)
{
    const uint64_t lanes[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    memcpy(START_LANES, lanes, sizeof lanes);
    kvn_use(kvn_kernel(0));
}

/* --- batches ---------------------------------------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t low, high; /* [low, high): all bytes of one side are inside */
} Range;

typedef struct {
    uint64_t pieces, parts, size;
    const uint64_t *targets, *sources, *lengths; /* lengths: NULL if each piece has parts * size bytes */
    uint64_t *sums;
    int stream;
    _Atomic uint64_t next;
    uint64_t step;
} CopyBatch;

static int inside(uint64_t at, uint64_t bytes, Range range)
{
    return at >= range.low && at <= range.high && bytes <= range.high - at;
}

static int check(const CopyBatch *batch, Range targets, Range sources, uint64_t *total)
{
    uint64_t most;
    if (batch->parts == 0 || __builtin_mul_overflow(batch->parts, batch->size, &most) || (!batch->targets && !batch->sums)
        || (batch->lengths && (batch->sums || batch->parts != 1)) || batch->pieces > UINT64_MAX / 16 / batch->parts)
        return BAD_SHAPE;
    *total = 0;
    for (uint64_t i = 0; i < batch->pieces; i++) {
        const uint64_t bytes = batch->lengths ? batch->lengths[i] : most, from = batch->sources[i];
        if (!inside(from, bytes, sources))
            return OUT_OF_RANGE;
        if (batch->targets) {
            const uint64_t to = batch->targets[i];
            if (!inside(to, bytes, targets))
                return OUT_OF_RANGE;
            if (to < from + bytes && from < to + bytes)
                return OVERLAP;
        }
        *total += bytes;
    }
    return DONE;
}

static int mode_of(const CopyBatch *batch, const uint8_t *to)
{
    if (!batch->stream || (uintptr_t)to % 16)
        return CACHED;
    return (uintptr_t)to % STRIPE ? STREAMED_QUARTERS : STREAMED;
}

/* memcpy is fastest if its target is aligned to cache lines, or long. Other pieces it copies at two thirds of the speed on some
 * processors. */
static void copy_bytes(const CopyBatch *batch, uint8_t *to, const uint8_t *from, uint64_t bytes)
{
    const int mode = mode_of(batch, to);
    if (mode == CACHED && ((uintptr_t)to % STRIPE == 0 || bytes >= LONG))
        memcpy(to, from, bytes);
    else
        kernel->copy(to, from, bytes, mode);
}

static uint64_t copy_and_hash(const CopyBatch *batch, uint8_t *to, const uint8_t *from)
{
    if (batch->size > SHORT)
        return kernel->hash(from, to, batch->size, mode_of(batch, to));
    uint8_t copied[SHORT]; /* both the hash and the target get these bytes, even if the source changes */
    memcpy(copied, from, batch->size);
    if (to)
        memcpy(to, copied, batch->size);
    return hash_short(copied, batch->size);
}

/* Work on parts [first, end), counted over all pieces. */
static void run_parts(const CopyBatch *batch, uint64_t first, uint64_t end)
{
    while (first < end) {
        const uint64_t piece = first / batch->parts, part = first % batch->parts, at = part * batch->size;
        uint64_t upto = first + batch->parts - part;
        if (upto > end)
            upto = end;
        const uint8_t *from = (const uint8_t *)(uintptr_t)batch->sources[piece] + at;
        uint8_t *to = batch->targets ? (uint8_t *)(uintptr_t)batch->targets[piece] + at : NULL;
        if (!batch->sums) {
            copy_bytes(batch, to, from, batch->lengths ? batch->lengths[piece] : (upto - first) * batch->size);
        } else
            for (uint64_t i = first; i < upto; i++, from += batch->size, to = to ? to + batch->size : NULL)
                batch->sums[i] = copy_and_hash(batch, to, from);
        first = upto;
    }
}

static void *run_share(void *argument)
{
    CopyBatch *batch = argument;
    const uint64_t all = batch->pieces * batch->parts;
    for (;;) {
        const uint64_t first = atomic_fetch_add(&batch->next, batch->step);
        if (first >= all)
            break;
        run_parts(batch, first, all - first < batch->step ? all : first + batch->step);
    }
    if (batch->stream)
        fence();
    return NULL;
}

/* Compute the checksums of consecutive parts of contiguous memory, in the calling thread: a short call, without tables. */
void kvn_hash(const uint8_t *in, uint64_t parts, uint64_t size, uint64_t *sums)
{
    for (uint64_t i = 0; i < parts; i++, in += size)
        sums[i] = size > SHORT ? kernel->hash(in, NULL, size, CACHED) : hash_short(in, size);
}

/* Copy pieces (`targets` given), compute the checksum of each part (`sums` given), or both.
 *
 * Each piece has `parts` >= 1 parts of `size` bytes; or one part of `lengths[i]` bytes, without checksums. `bounds` are {low, high}
 * of the targets and {low, high} of the sources. A copy of `stream_from` bytes or more is stored past the caches. At most
 * `threads` threads work, each on at least `thread_bytes`. Returns DONE, or why no byte was moved. */
int kvn_run(uint64_t pieces, uint64_t parts, uint64_t size, const uint64_t *targets, const uint64_t *sources,
            const uint64_t *lengths, uint64_t *sums, const uint64_t *bounds, uint64_t stream_from, uint64_t threads,
            uint64_t thread_bytes)
{
    CopyBatch batch = {.pieces = pieces, .parts = parts, .size = size, .targets = targets, .sources = sources, .lengths = lengths,
                   .sums = sums};
    uint64_t total;
    const int wrong = check(&batch, (Range){bounds[0], bounds[1]}, (Range){bounds[2], bounds[3]}, &total);
    if (wrong != DONE)
        return wrong;
    batch.stream = targets && total >= stream_from;
    if (threads > MOST_THREADS)
        threads = MOST_THREADS;
    if (thread_bytes && threads > total / thread_bytes)
        threads = total / thread_bytes;
    if (threads < 2) {
        batch.step = UINT64_MAX;
        run_share(&batch);
        return DONE;
    }
    batch.step = pieces * parts / (threads * SHARES) + 1;
    pthread_t others[MOST_THREADS];
    uint64_t started = 0;
    while (started < threads - 1 && pthread_create(&others[started], NULL, run_share, &batch) == 0)
        started++;
    run_share(&batch);
    for (uint64_t i = 0; i < started; i++)
        pthread_join(others[i], NULL);
    return DONE;
}
