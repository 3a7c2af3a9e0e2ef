/* One accumulator step of XXH3, written for one instruction set. Included once per instruction set by kernel.c, which defines
 *
 *   NAME(x)      the name of x for this instruction set
 *   TARGET       attribute that lets the compiler use the instruction set
 *   VECTOR       a vector of 64-bit lanes; WIDTH: its bytes
 *   LOAD, STORE                            unaligned load and store
 *   STREAM, STREAM_QUARTERS                store past the caches to an address aligned to STRIPE, or to 16 bytes
 *   XOR, ADD, MULTIPLY_LOW_HIGH, SWAP      lane by lane; low 32 bits times high 32 bits of each lane; neighbours exchanged
 *   SCRAMBLE(acc, secret)                  ((acc ^ (acc >> 47)) ^ secret) * PRIME32_1
 */
#define VECTORS (STRIPE / WIDTH)

/* Hash a long input and copy it on the way, unless `out` is NULL. What is hashed is what was loaded and stored: one register. */
TARGET static uint64_t NAME(long)(const uint8_t *in, uint8_t *out, size_t length, int mode)
{
    VECTOR acc[VECTORS], data[VECTORS];
    const size_t stripes = (length - 1) / STRIPE;
    size_t in_block = 0;
    uint64_t lanes[STRIPE / 8];

    for (int v = 0; v < VECTORS; v++)
        acc[v] = LOAD(START + v * WIDTH);
    for (size_t s = 0; s <= stripes; s++) {
        const int last = s == stripes;
        const uint8_t *from = last ? in + length - STRIPE : in + s * STRIPE;
        const uint8_t *key = SECRET + (last ? SECRET_BYTES - STRIPE - 7 : in_block * 8);
        __builtin_prefetch(from + AHEAD);
        for (int v = 0; v < VECTORS; v++) {
            data[v] = LOAD(from + v * WIDTH);
            VECTOR keyed = XOR(data[v], LOAD(key + v * WIDTH));
            acc[v] = ADD(acc[v], ADD(MULTIPLY_LOW_HIGH(keyed), SWAP(data[v])));
        }
        if (out) {
            uint8_t *to = out + (from - in);
            if (last && length % STRIPE)
                mode = CACHED; /* overlaps bytes that were stored already */
            if (mode == STREAMED)
                for (int v = 0; v < VECTORS; v++)
                    STREAM(to + v * WIDTH, data[v]);
            else if (mode == STREAMED_QUARTERS)
                for (int v = 0; v < VECTORS; v++)
                    STREAM_QUARTERS(to + v * WIDTH, data[v]);
            else
                for (int v = 0; v < VECTORS; v++)
                    STORE(to + v * WIDTH, data[v]);
        }
        if (!last && ++in_block == BLOCK_STRIPES) {
            for (int v = 0; v < VECTORS; v++)
                acc[v] = SCRAMBLE(acc[v], LOAD(SECRET + SECRET_BYTES - STRIPE + v * WIDTH));
            in_block = 0;
        }
    }
    for (int v = 0; v < VECTORS; v++)
        STORE((uint8_t *)lanes + v * WIDTH, acc[v]);
    return merged(lanes, length);
}

/* Copy. With `mode` CACHED, four stripes are loaded before the first is stored. */
TARGET static void NAME(copy)(uint8_t *to, const uint8_t *from, size_t length, int mode)
{
    size_t at = 0;
    for (; mode == CACHED && at + 4 * STRIPE <= length; at += 4 * STRIPE) {
        VECTOR data[4 * VECTORS];
        for (int s = 0; s < 4; s++)
            __builtin_prefetch(from + at + s * STRIPE + AHEAD);
        for (int v = 0; v < 4 * VECTORS; v++)
            data[v] = LOAD(from + at + v * WIDTH);
        for (int v = 0; v < 4 * VECTORS; v++)
            STORE(to + at + v * WIDTH, data[v]);
    }
    for (; mode != CACHED && at + STRIPE <= length; at += STRIPE) {
        __builtin_prefetch(from + at + AHEAD);
        VECTOR data[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            data[v] = LOAD(from + at + v * WIDTH);
        if (mode == STREAMED)
            for (int v = 0; v < VECTORS; v++)
                STREAM(to + at + v * WIDTH, data[v]);
        else
            for (int v = 0; v < VECTORS; v++)
                STREAM_QUARTERS(to + at + v * WIDTH, data[v]);
    }
    memcpy(to + at, from + at, length - at);
}

#undef NAME
#undef TARGET
#undef VECTOR
#undef WIDTH
#undef LOAD
#undef STORE
#undef STREAM
#undef STREAM_QUARTERS
#undef XOR
#undef ADD
#undef MULTIPLY_LOW_HIGH
#undef SWAP
#undef SCRAMBLE
#undef VECTORS
