// Built with sanitizers: leaves and clones of every alignment and tail, each in memory of exactly its size, by
// one launch of the digest kernel. Prints how many had the digest of the definition and the bytes of their leaf.
#include "emulated_warp.h"

#include "device/cuda_digest.h"
#include "device/digest_table.h"

#include <cstring>

using namespace flashckpt;

extern "C" void emulate_digest(DigestTable* table, Word num_entries, Word* digests, unsigned num_blocks,
                               std::uint64_t seed, std::uint64_t* did);

namespace {

// Word by word, as the definition stands in definition.h.
Word defined_digest(const std::uint8_t* leaf, std::size_t num_bytes) {
    Word hashes = 0;
    for (std::size_t start = 0; start < num_bytes; start += kBlockBytes) {
        Word words[kBlockWords] = {}, first[kDigestLanes], second[kDigestLanes], folds = 0;
        std::memcpy(words, leaf + start, std::min<std::size_t>(kBlockBytes, num_bytes - start));
        for (int lane = 0; lane < kDigestLanes; ++lane) {
            first[lane] = first_start(lane);
            second[lane] = second_start(lane);
        }
        for (int w = 0; w < kBlockWords; ++w) {
            first[w % kDigestLanes] += product(words[w], first_key(w));
            first[(w % kDigestLanes) ^ 1] += words[w];
            second[w % kDigestLanes] += product(words[w], second_key(w));
        }
        for (int lane = 0; lane < kDigestLanes; lane += 2) {
            folds += fold_first(lane, first[lane], first[lane + 1]);
            folds += fold_second(lane, second[lane], second[lane + 1]);
        }
        hashes += block_hash(start / kBlockBytes, folds);
    }
    return finish_digest(num_bytes, hashes);
}

// The sanitizer watches what is before and after it, but for the first bytes of eight that are another's.
class Exact {
  public:
    Exact(std::size_t num_bytes, std::size_t shift)
        : memory_(static_cast<std::uint8_t*>(std::malloc(shift + num_bytes + (shift + num_bytes == 0)))),
          shift_(shift) {}
    ~Exact() { std::free(memory_); }
    Exact(Exact&& other) noexcept : memory_(std::exchange(other.memory_, nullptr)), shift_(other.shift_) {}
    std::uint8_t* data() const { return memory_ + shift_; }

  private:
    std::uint8_t* memory_;
    std::size_t shift_;
};

} // namespace

int main() {
    std::mt19937_64 random(7);
    std::vector<Exact> leaves, clones;
    std::vector<std::uint64_t> sources, destinations, sizes;
    for (std::size_t shift : {0, 1, 2, 4, 8}) {
        for (std::size_t tail = 0; tail < kBlockBytes; tail += shift == 1 ? 1 : 5) {
            std::size_t num_bytes = tail + kBlockBytes * (random() % 8 == 0 ? random() % 6 : 0);
            leaves.emplace_back(num_bytes, shift);
            clones.emplace_back(num_bytes, std::size_t{1} << random() % 5);
            for (std::size_t i = 0; i < num_bytes; ++i)
                leaves.back().data()[i] = static_cast<std::uint8_t>(random());
            sources.push_back(reinterpret_cast<std::uintptr_t>(leaves.back().data()));
            destinations.push_back(tail % 3 == 0 ? 0
                                                 : reinterpret_cast<std::uintptr_t>(clones.back().data()));
            sizes.push_back(num_bytes);
        }
    }
    std::vector<std::uint8_t> made;
    if (Error error = digest_table(sources.data(), destinations.data(), sizes.data(), sizes.size(), made))
        emulated::fail(error.message.c_str());
    std::vector<Word> table(made.size() / sizeof(Word)), digests(sizes.size(), kEmptyDigest);
    std::memcpy(table.data(), made.data(), made.size());
    emulate_digest(reinterpret_cast<DigestTable*>(table.data()), sizes.size(), digests.data(), 5, 11, nullptr);
    std::size_t equal = 0;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
        bool same = destinations[i] == 0 || std::memcmp(leaves[i].data(), clones[i].data(), sizes[i]) == 0;
        equal += same && digests[i] == defined_digest(leaves[i].data(), sizes[i]);
    }
    std::printf("%zu of %zu\n", equal, sizes.size());
    return equal == sizes.size() ? 0 : 1;
}
