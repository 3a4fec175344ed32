#include "digest/words.h"

#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

static_assert(std::endian::native == std::endian::little, "words are little-endian by definition");

namespace flashckpt {
namespace {

constexpr std::size_t kLanes = 16;
constexpr std::size_t kRowBytes = kLanes * 4;

std::uint64_t word_at(const std::uint8_t* source) {
    std::int32_t word;
    std::memcpy(&word, source, 4);
    return static_cast<std::uint64_t>(static_cast<std::int64_t>(word));
}

// No multiplication is needed inside a block: lane l holds A = Σ s over rows and the running sum
// W = Σ (n - row)·s, from which Σ row·s = n·A - W.
Sums fold(const std::uint64_t* lane_sums, const std::uint64_t* lane_runs, std::uint64_t rows) {
    Sums sums;
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
        std::uint64_t by_row = rows * lane_sums[lane] - lane_runs[lane];
        sums.plain += lane_sums[lane];
        sums.weighted += 2 * kLanes * by_row + (2 * lane + 1) * lane_sums[lane];
    }
    return sums;
}

void add_words(Sums& sums, const std::uint8_t* source, std::size_t first, std::size_t num_words) {
    for (std::size_t j = first; j < first + num_words; ++j, source += 4) {
        std::uint64_t word = word_at(source);
        sums.plain += word;
        sums.weighted += (2 * j + 1) * word;
    }
}

Sums rows_portable(const std::uint8_t* source, std::size_t rows) {
    std::uint64_t lane_sums[kLanes] = {};
    std::uint64_t lane_runs[kLanes] = {};
    for (std::size_t row = 0; row < rows; ++row, source += kRowBytes) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            lane_sums[lane] += word_at(source + 4 * lane);
            lane_runs[lane] += lane_sums[lane];
        }
    }
    return fold(lane_sums, lane_runs, rows);
}

Sums copy_rows_portable(std::uint8_t* destination, const std::uint8_t* source, std::size_t rows) {
    std::memcpy(destination, source, rows * kRowBytes);
    // Summed from the destination: a source that is written meanwhile must not give a digest of other bytes.
    return rows_portable(destination, rows);
}

#if defined(__x86_64__)
#define FLASHCKPT_AVX2 __attribute__((target("avx2")))

enum class Store { none, cached, streaming };

// How far ahead a row is asked for. The processor's own prefetch stops at page ends; measured, this is worth
// a quarter of the rate. Marked as used once, so that it does not push the model out of the caches.
constexpr std::size_t kAheadRows = 40;

struct Lanes {
    __m256i sums[4] = {};
    __m256i runs[4] = {};

    FLASHCKPT_AVX2 __attribute__((always_inline)) void add(int quarter, __m128i words) {
        sums[quarter] = _mm256_add_epi64(sums[quarter], _mm256_cvtepi32_epi64(words));
        runs[quarter] = _mm256_add_epi64(runs[quarter], sums[quarter]);
    }

    FLASHCKPT_AVX2 Sums fold_rows(std::size_t rows) const {
        alignas(32) std::uint64_t lane_sums[kLanes];
        alignas(32) std::uint64_t lane_runs[kLanes];
        for (int quarter = 0; quarter < 4; ++quarter) {
            _mm256_store_si256(reinterpret_cast<__m256i*>(lane_sums) + quarter, sums[quarter]);
            _mm256_store_si256(reinterpret_cast<__m256i*>(lane_runs) + quarter, runs[quarter]);
        }
        return fold(lane_sums, lane_runs, rows);
    }
};

template <Store store>
FLASHCKPT_AVX2 __attribute__((always_inline)) inline void do_row(Lanes& lanes, std::uint8_t* destination,
                                                                 const std::uint8_t* source) {
    for (int half = 0; half < 2; ++half) {
        __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 32 * half));
        // Held in a register: a second load could see other bytes than those that are stored.
        asm volatile("" : "+x"(bytes));
        lanes.add(2 * half, _mm256_castsi256_si128(bytes));
        lanes.add(2 * half + 1, _mm256_extracti128_si256(bytes, 1));
        auto* out = reinterpret_cast<__m256i*>(destination + 32 * half);
        if constexpr (store == Store::cached) _mm256_storeu_si256(out, bytes);
        if constexpr (store == Store::streaming) _mm256_stream_si256(out, bytes);
    }
}

template <Store store>
FLASHCKPT_AVX2 Sums rows_avx2(std::uint8_t* destination, const std::uint8_t* source, std::size_t rows) {
    constexpr std::size_t step = store == Store::none ? 0 : kRowBytes;
    Lanes lanes;
    std::size_t row = 0;
#pragma GCC unroll 4
    for (; row + kAheadRows < rows; ++row, source += kRowBytes, destination += step) {
        _mm_prefetch(reinterpret_cast<const char*>(source + kAheadRows * kRowBytes), _MM_HINT_NTA);
        do_row<store>(lanes, destination, source);
    }
    for (; row < rows; ++row, source += kRowBytes, destination += step) {
        do_row<store>(lanes, destination, source);
    }
    return lanes.fold_rows(rows);
}

const bool kHasAvx2 = __builtin_cpu_supports("avx2") != 0;
#endif

Sums sum_rows(const std::uint8_t* source, std::size_t rows) {
#if defined(__x86_64__)
    if (kHasAvx2) return rows_avx2<Store::none>(nullptr, source, rows);
#endif
    return rows_portable(source, rows);
}

Sums copy_rows(std::uint8_t* destination, const std::uint8_t* source, std::size_t rows,
               [[maybe_unused]] bool stream) {
#if defined(__x86_64__)
    if (kHasAvx2) {
        return stream ? rows_avx2<Store::streaming>(destination, source, rows)
                      : rows_avx2<Store::cached>(destination, source, rows);
    }
#endif
    // In blocks that stay in the first cache, since the portable loop goes over them twice.
    constexpr std::size_t block_rows = 8192 / kRowBytes;
    Sums sums;
    for (std::size_t row = 0; row < rows; row += block_rows) {
        std::size_t count = rows - row < block_rows ? rows - row : block_rows;
        Sums block = copy_rows_portable(destination + row * kRowBytes, source + row * kRowBytes, count);
        sums.plain += block.plain;
        sums.weighted += block.weighted + 2 * (row * kLanes) * block.plain;
    }
    return sums;
}

// Copies and adds words one by one, through a register, so that what is summed is what is stored.
void copy_add_words(Sums& sums, std::uint8_t* destination, const std::uint8_t* source, std::size_t first,
                    std::size_t num_words) {
    for (std::size_t j = first; j < first + num_words; ++j, source += 4, destination += 4) {
        std::uint32_t bits;
        std::memcpy(&bits, source, 4);
        std::memcpy(destination, &bits, 4);
        auto word = static_cast<std::uint64_t>(static_cast<std::int64_t>(static_cast<std::int32_t>(bits)));
        sums.plain += word;
        sums.weighted += (2 * j + 1) * word;
    }
}

} // namespace

Sums sum_words(const std::uint8_t* source, std::size_t num_words) {
    std::size_t rows = num_words / kLanes;
    Sums sums = rows > 0 ? sum_rows(source, rows) : Sums{};
    add_words(sums, source + rows * kRowBytes, rows * kLanes, num_words % kLanes);
    return sums;
}

Sums copy_words(std::uint8_t* destination, const std::uint8_t* source, std::size_t num_words, bool stream) {
    auto misplaced = reinterpret_cast<std::uintptr_t>(destination) % kRowBytes;
    if (misplaced % 4 != 0) stream = false;
    std::size_t head = stream && misplaced != 0 ? (kRowBytes - misplaced) / 4 : 0;
    if (head > num_words) head = num_words;
    Sums sums;
    copy_add_words(sums, destination, source, 0, head);
    std::size_t rows = (num_words - head) / kLanes;
    if (rows > 0) {
        Sums middle = copy_rows(destination + 4 * head, source + 4 * head, rows, stream);
        sums.plain += middle.plain;
        sums.weighted += middle.weighted + 2 * head * middle.plain;
    }
    std::size_t done = head + rows * kLanes;
    copy_add_words(sums, destination + 4 * done, source + 4 * done, done, num_words - done);
    return sums;
}

void settle_stores() {
#if defined(__x86_64__)
    _mm_sfence();
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

} // namespace flashckpt
