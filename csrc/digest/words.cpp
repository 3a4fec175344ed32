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
enum class Store { none, cached, streaming };

template <Store store>
__attribute__((target("avx2"))) Sums rows_avx2(std::uint8_t* destination, const std::uint8_t* source,
                                               std::size_t rows) {
    __m256i sums[4] = {};
    __m256i runs[4] = {};
    for (std::size_t row = 0; row < rows; ++row) {
        for (int half = 0; half < 2; ++half) {
            __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 32 * half));
            __m256i low = _mm256_cvtepi32_epi64(_mm256_castsi256_si128(bytes));
            __m256i high = _mm256_cvtepi32_epi64(_mm256_extracti128_si256(bytes, 1));
            sums[2 * half] = _mm256_add_epi64(sums[2 * half], low);
            sums[2 * half + 1] = _mm256_add_epi64(sums[2 * half + 1], high);
            runs[2 * half] = _mm256_add_epi64(runs[2 * half], sums[2 * half]);
            runs[2 * half + 1] = _mm256_add_epi64(runs[2 * half + 1], sums[2 * half + 1]);
            auto* out = reinterpret_cast<__m256i*>(destination + 32 * half);
            if constexpr (store == Store::cached) _mm256_storeu_si256(out, bytes);
            if constexpr (store == Store::streaming) _mm256_stream_si256(out, bytes);
        }
        source += kRowBytes;
        if constexpr (store != Store::none) destination += kRowBytes;
    }
    alignas(32) std::uint64_t lane_sums[kLanes];
    alignas(32) std::uint64_t lane_runs[kLanes];
    for (int quarter = 0; quarter < 4; ++quarter) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(lane_sums) + quarter, sums[quarter]);
        _mm256_store_si256(reinterpret_cast<__m256i*>(lane_runs) + quarter, runs[quarter]);
    }
    return fold(lane_sums, lane_runs, rows);
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
