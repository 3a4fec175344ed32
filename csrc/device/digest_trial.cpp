#include "device/digest_trial.h"

#include "base/posix.h"
#include "device/cuda_digest.h"
#include "device/digest_table.h"
#include "digest/digest.h"

#include <cstring>
#include <vector>

namespace flashckpt {
namespace {

constexpr std::uint64_t kShifts[] = {0, 1, 2, 4, 8};
// Sizes: empty; below a word, a block, a group; whole ones; several warps'.
constexpr std::uint64_t kSizes[] = {0, 1, 7, 1000, 4096, 5001, 70001};

// Owns a stream and memory on the device.
class Workplace {
  public:
    explicit Workplace(const Driver& driver) : driver_(driver) {}
    Workplace(const Workplace&) = delete;
    Workplace& operator=(const Workplace&) = delete;
    ~Workplace() {
        // Queued work may still use the memory.
        if (stream_ != nullptr) driver_.stream_synchronize(stream_);
        if (memory_ != 0) driver_.memory_free(memory_);
        if (stream_ != nullptr) driver_.stream_destroy(stream_);
    }

    Error take(std::uint64_t num_bytes) {
        if (Error error = check(driver_.stream_create(&stream_, kCuStreamNonBlocking))) return error;
        return check(driver_.memory_take(&memory_, num_bytes));
    }
    Error write(std::uint64_t offset, const std::vector<std::uint8_t>& bytes) {
        return check(driver_.copy_to_device(memory_ + offset, bytes.data(), bytes.size(), stream_));
    }
    Error read(std::uint64_t offset, void* out, std::size_t num_bytes) {
        if (Error error = check(driver_.copy_to_host(out, memory_ + offset, num_bytes, stream_)))
            return error;
        return check(driver_.stream_synchronize(stream_));
    }
    std::uint64_t memory() const { return memory_; }
    CuStream stream() const { return stream_; }

  private:
    Error check(CuResult code) {
        return code == kCuSuccess ? Error{} : driver_.failure(code, "try the kernel of digests");
    }

    const Driver& driver_;
    CuStream stream_ = nullptr;
    std::uint64_t memory_ = 0;
};

// Consecutive leaves, each at its own shift from a multiple of 16, and their clones with the shifts in
// another order.
struct Leaves {
    std::vector<std::uint64_t> sources, clones, sizes; // offsets
    std::uint64_t num_bytes = 0;

    Leaves() {
        for (std::size_t shift = 0; shift < std::size(kShifts); ++shift) {
            for (std::size_t i = 0; i < std::size(kSizes); ++i) {
                sizes.push_back(kSizes[i]);
                sources.push_back(place(kShifts[shift], kSizes[i]));
                clones.push_back(place(kShifts[(shift + i) % std::size(kShifts)], kSizes[i]));
            }
        }
    }
    std::uint64_t place(std::uint64_t shift, std::uint64_t size) {
        std::uint64_t start = num_bytes + shift;
        num_bytes = round_up(start + size, 16);
        return start;
    }
    std::vector<std::uint64_t> at(std::uint64_t memory, std::vector<std::uint64_t> offsets) const {
        for (std::uint64_t& offset : offsets)
            offset += memory;
        return offsets;
    }
};

std::vector<std::uint8_t> noise(std::uint64_t num_bytes) {
    std::vector<std::uint8_t> bytes(num_bytes);
    for (std::uint64_t i = 0; i < num_bytes; ++i)
        bytes[i] = static_cast<std::uint8_t>(finalize(i));
    return bytes;
}

Error compare(const Leaves& leaves, const std::vector<std::uint8_t>& before,
              const std::vector<std::uint8_t>& after, const std::vector<std::uint64_t>& digests) {
    for (std::size_t i = 0; i < leaves.sizes.size(); ++i) {
        const std::uint8_t* leaf = before.data() + leaves.sources[i];
        bool is_cloned = std::memcmp(leaf, after.data() + leaves.clones[i], leaves.sizes[i]) == 0;
        if (is_cloned && digests[i] == digest(leaf, leaves.sizes[i])) continue;
        std::string what = is_cloned ? "other digests" : "other copies";
        return {Kind::device, 0, "on this device the kernel of digests gives " + what + " than it should",
                ""};
    }
    return {};
}

} // namespace

Error try_digests(const Driver& driver, const DigestLaunch& launch) {
    Leaves leaves;
    std::size_t count = leaves.sizes.size();
    std::uint64_t table_at = round_up(leaves.num_bytes, 16);
    std::uint64_t digests_at = table_at + round_up(digest_table_bytes(count), 16);
    Workplace place(driver);
    if (Error error = place.take(digests_at + count * sizeof(Word))) return error;
    std::vector<std::uint8_t> table;
    std::vector<std::uint8_t> before = noise(leaves.num_bytes);
    auto sources = leaves.at(place.memory(), leaves.sources);
    auto clones = leaves.at(place.memory(), leaves.clones);
    Error error = digest_table(sources.data(), clones.data(), leaves.sizes.data(), count, table);
    if (!error) error = place.write(0, before);
    if (!error) error = place.write(table_at, table);
    if (!error) error = launch(place.stream(), place.memory() + table_at, count, place.memory() + digests_at);
    std::vector<std::uint8_t> after(leaves.num_bytes);
    std::vector<std::uint64_t> digests(count);
    if (!error) error = place.read(0, after.data(), after.size());
    if (!error) error = place.read(digests_at, digests.data(), count * sizeof(Word));
    return error ? error : compare(leaves, before, after, digests);
}

} // namespace flashckpt
