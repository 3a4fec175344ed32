// Digests of many leaves in one launch on a CUDA device, alone or fused with the copy of a clone. Memory is
// read once, and the digest of a clone is computed from the words that are stored.
//
// scripts/make-ptx makes digest.ptx from this file; nothing compiles it at run time. The tests also compile
// it for the host (tests/native/emulated_warp.h). Never reads or writes a byte outside of a leaf: a
// misaligned or too long load is an error that destroys the user's context.
#include "device/digest_table.h"

namespace flashckpt {
namespace {

constexpr int kWarpThreads = 32;
constexpr unsigned kWholeWarp = 0xFFFFFFFFu;
constexpr int kThreadWords = kGroupWords / kWarpThreads; // per group: words thread, thread + 32, …
constexpr int kBlockSteps = kBlockWords / kWarpThreads;  // the share of these in each block
constexpr Word kLongestRun = 64;                         // groups between two searches and two atomic adds

#if defined(__CUDA_ARCH__)
// One load that the compiler may neither repeat nor split: another stream may be writing.
__device__ Word load_unit(const unsigned long long* at) {
    unsigned long long unit;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(unit) : "l"(at));
    return unit;
}
__device__ Word load_unit(const unsigned* at) {
    unsigned unit;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(unit) : "l"(at));
    return unit;
}
__device__ Word load_unit(const unsigned short* at) {
    unsigned short unit;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(unit) : "l"(at));
    return unit;
}
__device__ Word load_unit(const unsigned char* at) {
    unsigned unit;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(unit) : "l"(at));
    return unit;
}
__device__ void store_unit(unsigned long long* at, Word unit) {
    asm volatile("st.global.u64 [%0], %1;" ::"l"(at), "l"(unit) : "memory");
}
__device__ void store_unit(unsigned* at, Word unit) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(static_cast<unsigned>(unit)) : "memory");
}
__device__ void store_unit(unsigned short* at, Word unit) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(at), "h"(static_cast<unsigned short>(unit)) : "memory");
}
__device__ void store_unit(unsigned char* at, Word unit) {
    asm volatile("st.global.u8 [%0], %1;" ::"l"(at), "r"(static_cast<unsigned>(unit)) : "memory");
}
// sum + product(word, key) as one instruction, which the compiler does not find itself.
__device__ Word add_product(Word sum, Word word, Word key) {
    Word mixed = word ^ key;
    asm("mad.wide.u32 %0, %1, %2, %0;"
        : "+l"(sum)
        : "r"(static_cast<unsigned>(mixed)), "r"(static_cast<unsigned>(mixed >> 32)));
    return sum;
}
#else
__device__ Word add_product(Word sum, Word word, Word key) {
    return sum + product(word, key);
}
#endif

__device__ Word from_thread(Word value, int thread_mask) {
    return __shfl_xor_sync(kWholeWarp, static_cast<unsigned long long>(value), thread_mask);
}

// The existing bytes of a word, lowest first; the others are zero.
template <class Unit>
__device__ Word load_units(Word address, int num_units) {
    const Unit* at = reinterpret_cast<const Unit*>(address);
    Word word = 0;
#pragma unroll
    for (int i = 0; i < num_units; ++i)
        word |= load_unit(at + i) << (8 * sizeof(Unit) * i);
    return word;
}

template <class Unit>
__device__ void store_units(Word address, Word word, int num_units) {
    Unit* at = reinterpret_cast<Unit*>(address);
#pragma unroll
    for (int i = 0; i < num_units; ++i)
        store_unit(at + i, word >> (8 * sizeof(Unit) * i));
}

// One thread's share of a group: words[i] is word 32 i + thread. `num_words`: whole words of the group.
template <class Unit>
__device__ void load_words(Word address, int num_words, int thread, Word (&words)[kThreadWords]) {
    constexpr int units = sizeof(Word) / sizeof(Unit);
    if (num_words == kGroupWords) {
#pragma unroll
        for (int i = 0; i < kThreadWords; ++i)
            words[i] = load_units<Unit>(address + sizeof(Word) * (kWarpThreads * i + thread), units);
        return;
    }
#pragma unroll
    for (int i = 0; i < kThreadWords; ++i) {
        int word = kWarpThreads * i + thread;
        words[i] = word < num_words ? load_units<Unit>(address + sizeof(Word) * word, units) : 0;
    }
}

template <class Unit>
__device__ void store_words(Word address, int num_words, int thread, const Word (&words)[kThreadWords]) {
    constexpr int units = sizeof(Word) / sizeof(Unit);
#pragma unroll
    for (int i = 0; i < kThreadWords; ++i) {
        int word = kWarpThreads * i + thread;
        if (word < num_words) store_units<Unit>(address + sizeof(Word) * word, words[i], units);
    }
}

// A leaf's groups start at multiples of 4,096 bytes from its start, so all words have the leaf's alignment.
__device__ void load_group(Word address, int num_words, int thread, Word (&words)[kThreadWords]) {
    if (address % 8 == 0) {
        load_words<unsigned long long>(address, num_words, thread, words);
    } else if (address % 4 == 0) {
        load_words<unsigned>(address, num_words, thread, words);
    } else if (address % 2 == 0) {
        load_words<unsigned short>(address, num_words, thread, words);
    } else {
        load_words<unsigned char>(address, num_words, thread, words);
    }
}

__device__ void store_group(Word address, int num_words, int thread, const Word (&words)[kThreadWords]) {
    if (address % 8 == 0) {
        store_words<unsigned long long>(address, num_words, thread, words);
    } else if (address % 4 == 0) {
        store_words<unsigned>(address, num_words, thread, words);
    } else if (address % 2 == 0) {
        store_words<unsigned short>(address, num_words, thread, words);
    } else {
        store_words<unsigned char>(address, num_words, thread, words);
    }
}

// A thread's constants of the definition, computed once per launch. The bits of a thread's number in its warp
// determine its final sum: bits 0 and 3 one of the four blocks, 1 and 2 the pair of accumulators, 4 the set.
struct Constants {
    int thread;
    Word first[kBlockSteps]; // keys of this thread's words
    Word second[kBlockSteps];
    Word starts[2]; // initial values of the pair
    Word folds[2];  // fold keys of the pair

    __device__ explicit Constants(int number) : thread(number) {
#pragma unroll
        for (int step = 0; step < kBlockSteps; ++step) {
            first[step] = first_key(kWarpThreads * step + thread);
            second[step] = second_key(kWarpThreads * step + thread);
        }
        int lane = thread & 6;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            bool in_second = (thread & 16) != 0;
            starts[i] = in_second ? second_start(lane + i) : first_start(lane + i);
            folds[i] = in_second ? second_fold_key(lane + i) : first_fold_key(lane + i);
        }
    }

    __device__ Word block() const { return 2 * ((thread >> 3) & 1) + (thread & 1); }
};

// The sums of both sets over this thread's words of each block: [set][block].
__device__ void accumulate(const Constants& constants, const Word (&words)[kThreadWords],
                           Word (&sums)[2][kGroupBlocks]) {
#pragma unroll
    for (int block = 0; block < kGroupBlocks; ++block) {
        Word first = 0;
        Word second = 0;
        Word plain = 0;
#pragma unroll
        for (int step = 0; step < kBlockSteps; ++step) {
            Word word = words[kBlockSteps * block + step];
            first = add_product(first, word, constants.first[step]);
            second = add_product(second, word, constants.second[step]);
            plain += word;
        }
        // Words of a lane are added to its neighbour's accumulator.
        sums[0][block] = first + from_thread(plain, 1);
        sums[1][block] = second;
    }
}

// The sum of the eight folds of block `constants.block()`. At each step a thread passes half of its sums to
// another thread and keeps the other half, so that nothing is added twice.
__device__ Word join(const Constants& constants, const Word (&sums)[2][kGroupBlocks]) {
    bool second = (constants.thread & 16) != 0;
    bool upper = (constants.thread & 8) != 0;
    bool odd = (constants.thread & 1) != 0;
    Word of_set[kGroupBlocks];
#pragma unroll
    for (int block = 0; block < kGroupBlocks; ++block) {
        Word kept = second ? sums[1][block] : sums[0][block];
        of_set[block] = kept + from_thread(second ? sums[0][block] : sums[1][block], 16);
    }
    Word of_half[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        Word kept = upper ? of_set[2 + i] : of_set[i];
        of_half[i] = kept + from_thread(upper ? of_set[i] : of_set[2 + i], 8);
    }
    // An even thread gets the odd accumulator of its block, an odd thread the even accumulator of its block.
    Word mine = odd ? of_half[1] : of_half[0];
    Word other = from_thread(odd ? of_half[0] : of_half[1], 1);
    Word even_lane = (odd ? other : mine) + constants.starts[0];
    Word odd_lane = (odd ? mine : other) + constants.starts[1];
    Word folds = fold(even_lane ^ constants.folds[0], odd_lane ^ constants.folds[1]);
    folds += from_thread(folds, 2);
    folds += from_thread(folds, 4);
    return folds + from_thread(folds, 16);
}

// Copies one to seven bytes at a leaf's end in the thread that has their word, and inserts them. The loop
// over all places keeps `words` in registers: an index at run time would move the array to memory.
__device__ void take_rest(const DigestEntry& entry, Word offset, int num_bytes, int thread,
                          Word (&words)[kThreadWords]) {
    int word = num_bytes / static_cast<int>(sizeof(Word));
    int rest = num_bytes % static_cast<int>(sizeof(Word));
    if (rest == 0 || thread != word % kWarpThreads) return;
    Word at = offset + sizeof(Word) * static_cast<Word>(word);
    Word last = load_units<unsigned char>(entry.source + at, rest);
    if (entry.destination != 0) store_units<unsigned char>(entry.destination + at, last, rest);
#pragma unroll
    for (int i = 0; i < kThreadWords; ++i)
        words[i] |= last & (Word{0} - static_cast<Word>(i == word / kWarpThreads));
}

// The hash of one of the group's four blocks, 0 if the leaf ends before it.
__device__ Word group_hash(const Constants& constants, const DigestEntry& entry, Word group) {
    Word offset = group * kGroupBytes;
    Word left = entry.num_bytes - offset;
    int num_bytes = left < kGroupBytes ? static_cast<int>(left) : kGroupBytes;
    int num_words = num_bytes / static_cast<int>(sizeof(Word));
    Word words[kThreadWords];
    load_group(entry.source + offset, num_words, constants.thread, words);
    if (entry.destination != 0) store_group(entry.destination + offset, num_words, constants.thread, words);
    take_rest(entry, offset, num_bytes, constants.thread, words);
    Word sums[2][kGroupBlocks];
    accumulate(constants, words, sums);
    Word folds = join(constants, sums);
    Word block = constants.block();
    return block * kBlockBytes < static_cast<Word>(num_bytes)
               ? block_hash(kGroupBlocks * group + block, folds)
               : 0;
}

__device__ Word find_entry(const DigestEntry* entries, Word num_entries, Word group) {
    Word low = 0;
    Word high = num_entries;
    while (high - low > 1) {
        Word middle = low + (high - low) / 2;
        if (entries[middle].first_group <= group) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// Adds a warp's hashes of a leaf. The warp that adds the last group writes the digest. A leaf with a missing
// group keeps the mark of an empty digest.
__device__ void add_groups(const DigestEntry& entry, DigestScratch* scratch, Word hashes, Word num_groups,
                           Word* digest) {
    Word all = digest_groups(entry.num_bytes);
    if (num_groups < all) {
        atomicAdd(&scratch->hashes, hashes);
        // A warp that sees this warp's groups counted must also see its hashes.
        __threadfence();
        if (atomicAdd(&scratch->groups, num_groups) + num_groups != all) return;
        __threadfence();
        hashes = atomicAdd(&scratch->hashes, Word{0});
    }
    *digest = finish_digest(entry.num_bytes, hashes);
}

} // namespace
} // namespace flashckpt

// At the start `digests` holds the empty mark, and the table's scratch memory is zero.
extern "C" __global__ void __launch_bounds__(flashckpt::kDigestThreads, 2)
    flashckpt_digest(flashckpt::DigestTable* table, flashckpt::Word num_entries, flashckpt::Word* digests) {
    using namespace flashckpt;
    // Not the caller's table: compute nothing, so that nothing can be taken for a result.
    if (table->magic != kDigestTableMagic || table->num_entries != num_entries) return;
    const DigestEntry* entries = reinterpret_cast<const DigestEntry*>(table + 1);
    DigestScratch* scratch =
        reinterpret_cast<DigestScratch*>(reinterpret_cast<char*>(table) + digest_scratch_offset(num_entries));
    Word num_groups = table->num_groups;
    Word num_warps = static_cast<Word>(gridDim.x) * (kDigestThreads / kWarpThreads);
    Word warp = static_cast<Word>(blockIdx.x) * (kDigestThreads / kWarpThreads) + threadIdx.x / kWarpThreads;
    Constants constants(static_cast<int>(threadIdx.x) % kWarpThreads);

    // Run length gives each warp at least four runs, so that small tables keep all warps busy.
    Word run_groups = num_groups / (4 * num_warps);
    run_groups = run_groups < 1 ? 1 : run_groups > kLongestRun ? kLongestRun : run_groups;
    for (Word begin = warp * run_groups; begin < num_groups; begin += num_warps * run_groups) {
        Word end = num_groups - begin < run_groups ? num_groups : begin + run_groups;
        Word index = find_entry(entries, num_entries, begin);
        for (Word group = begin; group < end; ++index) {
            DigestEntry entry = entries[index];
            Word next = entries[index + 1].first_group;
            Word stop = next < end ? next : end;
            Word taken = stop - group;
            Word hashes = 0;
            for (; group < stop; ++group)
                hashes += group_hash(constants, entry, group - entry.first_group);
            hashes += from_thread(hashes, 1);
            hashes += from_thread(hashes, 8);
            if (constants.thread == 0) add_groups(entry, scratch + index, hashes, taken, digests + index);
        }
    }
}
