// SPDX-License-Identifier: Apache-2.0
// Rows of a table that lies in a file: a pool of threads reads them, each where it must go. No Python and no CUDA in here, so that a CUDA
// graph can call it (cudaLaunchHostFunc) without the interpreter's lock.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PAGE = 4096, WIDTH = 256, SCALES = 8, ROW = WIDTH + SCALES, STRIPES = 64, SPAN = 2 * PAGE };

// A row's 256 weights lie at weights + row * weight_stride and its 8 scales at scales + row * scale_stride; in a packed file side by side.
// Rows first to last - 1 are this rank's. slots: rows that the cache holds, 0 for none.
struct table {
    int32_t fd, direct;
    int64_t first, last, weights, weight_stride, scales, scale_stride, slots;
    int64_t *keys;
    uint8_t *kept;
    pthread_mutex_t *stripes;
    _Atomic int64_t looked_up, found, reads;
};

// What a CUDA graph calls: count ids in, bytes out. A row that is not this rank's is left as zeros.
struct work {
    struct table *table;
    const int64_t *ids;
    uint8_t *weights, *scales;
    int64_t count;
};

static struct {
    pthread_mutex_t turn, lock;
    pthread_cond_t begin, end;
    const struct work *work;
    _Atomic int64_t next;
    _Atomic int failure;
    int64_t round;
    int threads, busy;
} pool = {.turn = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .begin = PTHREAD_COND_INITIALIZER, .end = PTHREAD_COND_INITIALIZER};

// O_DIRECT wants whole pages; a part of a row that crosses one takes two.
static int read_part(struct table *table, int64_t offset, int length, uint8_t *out, uint8_t *buffer)
{
    int64_t begin = table->direct ? offset & ~(int64_t)(PAGE - 1) : offset;
    int need = (int)(offset - begin) + length;
    int span = table->direct ? (need + PAGE - 1) / PAGE * PAGE : length;
    int done = 0;
    while (done < need) {
        ssize_t got = pread(table->fd, buffer + done, span - done, begin + done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return got < 0 ? errno : ENODATA;
        done += (int)got;
    }
    memcpy(out, buffer + (offset - begin), length);
    atomic_fetch_add_explicit(&table->reads, 1, memory_order_relaxed);
    return 0;
}

static int read_row(struct table *table, int64_t row, uint8_t *weights, uint8_t *scales, uint8_t *buffer)
{
    uint8_t both[ROW];
    int64_t at = table->weights + row * table->weight_stride;
    int failure;
    if (table->scales == table->weights + WIDTH && table->scale_stride == table->weight_stride) {
        failure = read_part(table, at, ROW, both, buffer);
    } else {
        failure = read_part(table, at, WIDTH, both, buffer);
        if (!failure)
            failure = read_part(table, table->scales + row * table->scale_stride, SCALES, both + WIDTH, buffer);
    }
    if (failure)
        return failure;
    memcpy(weights, both, WIDTH);
    memcpy(scales, both + WIDTH, SCALES);
    return 0;
}

static int one(const struct work *work, int64_t index, uint8_t *buffer)
{
    struct table *table = work->table;
    int64_t row = work->ids[index];
    uint8_t *weights = work->weights + index * WIDTH, *scales = work->scales + index * SCALES;
    if (row < table->first || row >= table->last) {
        memset(weights, 0, WIDTH);
        memset(scales, 0, SCALES);
        return 0;
    }
    if (!table->slots)
        return read_row(table, row, weights, scales, buffer);
    int64_t slot = (int64_t)((uint64_t)row * 0x9E3779B97F4A7C15u >> 17) % table->slots;
    uint8_t *kept = table->kept + slot * ROW;
    pthread_mutex_t *stripe = &table->stripes[slot % STRIPES];
    pthread_mutex_lock(stripe);
    int hit = table->keys[slot] == row;
    if (hit) {
        memcpy(weights, kept, WIDTH);
        memcpy(scales, kept + WIDTH, SCALES);
    }
    pthread_mutex_unlock(stripe);
    if (hit) {
        atomic_fetch_add_explicit(&table->found, 1, memory_order_relaxed);
        return 0;
    }
    int failure = read_row(table, row, weights, scales, buffer);
    if (failure)
        return failure;
    pthread_mutex_lock(stripe);
    table->keys[slot] = row;
    memcpy(kept, weights, WIDTH);
    memcpy(kept + WIDTH, scales, SCALES);
    pthread_mutex_unlock(stripe);
    return 0;
}

static void take(const struct work *work, uint8_t *buffer)
{
    int64_t index;
    while ((index = atomic_fetch_add(&pool.next, 1)) < work->count) {
        int failure = one(work, index, buffer);
        if (failure)
            atomic_store(&pool.failure, failure);
    }
}

static void *reader(void *round)
{
    uint8_t *buffer = aligned_alloc(PAGE, SPAN);
    int64_t seen = (intptr_t)round; // the last one that it has no part in
    for (;;) {
        pthread_mutex_lock(&pool.lock);
        while (pool.round == seen)
            pthread_cond_wait(&pool.begin, &pool.lock);
        seen = pool.round;
        const struct work *work = pool.work;
        pthread_mutex_unlock(&pool.lock);
        take(work, buffer);
        pthread_mutex_lock(&pool.lock);
        if (--pool.busy == 0)
            pthread_cond_signal(&pool.end);
        pthread_mutex_unlock(&pool.lock);
    }
    return NULL;
}

// A process that was forked has none of its parent's threads, and starts its own.
static void forked(void)
{
    pthread_mutex_init(&pool.turn, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.begin, NULL);
    pthread_cond_init(&pool.end, NULL);
    pool.threads = pool.busy = 0;
}

__attribute__((constructor)) static void loaded(void)
{
    pthread_atfork(NULL, NULL, forked);
}

// Starts what is missing of so many readers; they serve all tables. Returns an errno.
int gb10_threads(int count)
{
    pthread_mutex_lock(&pool.turn);
    int failure = 0;
    while (!failure && pool.threads < count) {
        pthread_t thread;
        failure = pthread_create(&thread, NULL, reader, (void *)(intptr_t)pool.round);
        if (!failure) {
            pthread_detach(thread);
            pool.threads++;
        }
    }
    pthread_mutex_unlock(&pool.turn);
    return failure;
}

// Opens the file and fills in what is not given. Returns an errno.
int gb10_open(struct table *table, const char *path)
{
    table->fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    table->direct = table->fd >= 0;
    if (table->fd < 0 && errno == EINVAL)
        table->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (table->fd < 0)
        return errno;
    if (!table->slots)
        return 0;
    table->keys = malloc(table->slots * sizeof *table->keys);
    table->kept = malloc(table->slots * ROW);
    table->stripes = malloc(STRIPES * sizeof *table->stripes);
    if (!table->keys || !table->kept || !table->stripes)
        return ENOMEM;
    memset(table->keys, -1, table->slots * sizeof *table->keys);
    for (int i = 0; i < STRIPES; i++)
        pthread_mutex_init(&table->stripes[i], NULL);
    return 0;
}

void gb10_close(struct table *table)
{
    if (table->fd >= 0)
        close(table->fd);
    free(table->keys);
    free(table->kept);
    free(table->stripes);
    table->fd = -1;
    table->keys = NULL;
    table->kept = NULL;
    table->stripes = NULL;
}

// Reads all rows of a work; the caller waits. One work at a time. Returns an errno.
int gb10_read(const struct work *work)
{
    if (!work->count)
        return 0;
    pthread_mutex_lock(&pool.turn);
    atomic_store(&pool.next, 0);
    atomic_store(&pool.failure, 0);
    pthread_mutex_lock(&pool.lock);
    pool.work = work;
    pool.busy = pool.threads;
    pool.round++;
    pthread_cond_broadcast(&pool.begin);
    while (pool.busy)
        pthread_cond_wait(&pool.end, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    int failure = atomic_load(&pool.failure);
    atomic_fetch_add_explicit(&work->table->looked_up, work->count, memory_order_relaxed);
    pthread_mutex_unlock(&pool.turn);
    return failure;
}

// For cudaLaunchHostFunc, which takes no result: an answer from wrong rows is worse than none, so a failure ends the process.
void gb10_read_or_abort(void *work)
{
    int failure = gb10_read(work);
    if (failure) {
        fprintf(stderr, "gb10_vllm: an Engram row cannot be read (%s): see the file and the disk\n", strerror(failure));
        abort();
    }
}
