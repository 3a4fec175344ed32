#include "io/plan.h"

#include "base/posix.h"
#include "io/chunks.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <unistd.h>

namespace flashckpt {
namespace {

using Range = std::pair<std::uint64_t, std::uint64_t>;

enum State : std::uint8_t { left = 0, begun = 1, done = 2, bad = 3 };

constexpr std::uint64_t kMostBytes = 1ull << 62;
constexpr int kMostBuffers = 24; // of a chunk each

// Computes the extents. False if the repetitions of a step overlap in the file or exceed it.
bool measure(Copy& copy, std::uint64_t num_bytes) {
    copy.extents.assign(copy.steps.size() + 1, copy.run);
    if (copy.run == 0 || copy.run > num_bytes || copy.source > num_bytes) return false;
    for (std::size_t i = copy.steps.size(); i-- > 0;) {
        const Step& step = copy.steps[i];
        const std::uint64_t inner = copy.extents[i + 1];
        if (step.count == 0 || (step.count > 1 && step.source < inner)) return false;
        if (step.count > 1 && step.source > num_bytes / (step.count - 1)) return false;
        copy.extents[i] = inner + (step.count - 1) * step.source;
        if (copy.extents[i] > num_bytes) return false;
    }
    return copy.extents[0] <= num_bytes - copy.source;
}

// Calls `use` for ranges of the file that hold all bytes of a copy. Each chunk of a range has some of them.
template <class Use>
void each_range(const Copy& copy, std::size_t step, std::uint64_t source, std::uint64_t chunk_bytes,
                const Use& use) {
    bool is_dense = true;
    for (std::size_t i = step; i < copy.steps.size(); ++i) {
        is_dense = is_dense &&
                   (copy.steps[i].count == 1 || copy.steps[i].source - copy.extents[i + 1] < chunk_bytes);
    }
    if (is_dense) {
        use(Range{source, source + copy.extents[step]});
        return;
    }
    for (std::uint64_t i = 0; i < copy.steps[step].count; ++i)
        each_range(copy, step + 1, source + i * copy.steps[step].source, chunk_bytes, use);
}

// Bytes [begin, end) of the file.
struct Window {
    const std::uint8_t* data;
    std::uint64_t begin;
    std::uint64_t end;
};

template <std::size_t run>
void copy_elements(const std::uint8_t* source, std::uint8_t* target, const Step& step, std::uint64_t count) {
    for (std::uint64_t i = 0; i < count; ++i)
        std::memcpy(target + i * step.target, source + i * step.source, run);
}

// Repetitions that are completely in the window.
void copy_rows(const std::uint8_t* source, std::uint8_t* target, const Step& step, std::uint64_t count,
               std::uint64_t run) {
    switch (run) {
    case 1:
        return copy_elements<1>(source, target, step, count);
    case 2:
        return copy_elements<2>(source, target, step, count);
    case 4:
        return copy_elements<4>(source, target, step, count);
    case 8:
        return copy_elements<8>(source, target, step, count);
    default:
        for (std::uint64_t i = 0; i < count; ++i)
            std::memcpy(target + i * step.target, source + i * step.source, run);
    }
}

// Copies the bytes of a copy, from `step` on, that are in the window. Its first byte is at `source` and goes
// to `target`.
void copy_common(const Copy& copy, std::size_t step, std::uint64_t source, std::uint8_t* target,
                 const Window& window) {
    if (step == copy.steps.size()) {
        const std::uint64_t first = std::max(source, window.begin);
        const std::uint64_t last = std::min(source + copy.run, window.end);
        if (first < last)
            std::memcpy(target + (first - source), window.data + (first - window.begin), last - first);
        return;
    }
    const Step& each = copy.steps[step];
    const std::uint64_t extent = copy.extents[step + 1];
    std::uint64_t i = source + extent > window.begin || each.count == 1
                          ? 0
                          : (window.begin - source - extent) / each.source + 1;
    for (; i < each.count; ++i) {
        const std::uint64_t at = source + i * each.source;
        std::uint8_t* const into = target + i * each.target;
        if (at >= window.end) return;
        const std::uint64_t room = at >= window.begin ? window.end - at : 0;
        if (step + 1 == copy.steps.size() && room >= extent && each.count > 1) {
            const std::uint64_t count = std::min(each.count - i, (room - extent) / each.source + 1);
            copy_rows(window.data + (at - window.begin), into, each, count, copy.run);
            i += count - 1;
        } else {
            copy_common(copy, step + 1, at, into, window);
        }
    }
}

std::vector<LeafPart> sorted(std::vector<LeafPart> parts) {
    std::sort(parts.begin(), parts.end(),
              [](const LeafPart& one, const LeafPart& other) { return one.begin < other.begin; });
    return parts;
}

Error check_parts(const std::vector<LeafPart>& parts, const std::vector<std::uint64_t>& sizes) {
    std::uint64_t end = 0;
    for (const LeafPart& part : parts) {
        const std::uint64_t num_bytes = part.end - part.begin;
        if (num_bytes == 0 || part.begin < end) return value_error("parts of leaves overlap, or are empty");
        if (part.leaf >= sizes.size() || part.offset > sizes[part.leaf] ||
            num_bytes > sizes[part.leaf] - part.offset)
            return value_error("a part ends beyond the last byte of its leaf");
        end = part.end;
    }
    return {};
}

} // namespace

FilePlan::FilePlan(Geometry geometry, std::vector<Checksum> checksums, std::vector<Copy> copies,
                   std::vector<LeafPart> parts, const std::vector<Range>& ranges,
                   std::shared_ptr<PieceDigests> digests, bool direct, std::uint64_t progress)
    : geometry_(std::move(geometry)), checksums_(std::move(checksums)), copies_(std::move(copies)),
      audit_(geometry_, sorted(parts), digests), direct_(direct), progress_(progress) {
    std::vector<Range> needed = ranges;
    for (const LeafPart& part : parts)
        needed.emplace_back(part.begin, part.end);
    error_ = check(needed);
    if (!error_) error_ = check_parts(sorted(std::move(parts)), digests->sizes());
    if (!error_) find(needed);
}

Error FilePlan::check(const std::vector<Range>& ranges) {
    if (Error error = geometry_.check()) return error;
    if (geometry_.chunk_bytes % static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) != 0)
        return value_error("chunk_bytes must be a multiple of the page");
    if (checksums_.size() != geometry_.num_chunks()) {
        return value_error("there must be one checksum of 16 bytes for each of the " +
                           std::to_string(geometry_.num_chunks()) + " chunks");
    }
    for (const Range& range : ranges) {
        if (range.first > range.second || range.second > geometry_.num_bytes)
            return value_error("a range ends beyond the last byte");
    }
    for (Copy& copy : copies_) {
        if (!measure(copy, geometry_.num_bytes)) return value_error("a copy is not inside the file");
    }
    return {};
}

void FilePlan::find(const std::vector<Range>& ranges) {
    const std::uint64_t chunk_bytes = geometry_.chunk_bytes;
    std::vector<std::uint8_t> is_needed(geometry_.num_chunks());
    auto each_chunk_of = [&](const Range& range, const auto& use) {
        for (std::uint64_t chunk = range.first / chunk_bytes; chunk * chunk_bytes < range.second; ++chunk)
            use(chunk);
    };
    std::vector<std::vector<std::uint32_t>> by_chunk(geometry_.num_chunks());
    for (const Range& range : ranges)
        each_chunk_of(range, [&](std::uint64_t chunk) { is_needed[chunk] = 1; });
    for (std::uint32_t index = 0; index < copies_.size(); ++index) {
        each_range(copies_[index], 0, copies_[index].source, chunk_bytes, [&](const Range& range) {
            each_chunk_of(range, [&](std::uint64_t chunk) {
                is_needed[chunk] = 1;
                auto& here = by_chunk[chunk];
                if (here.empty() || here.back() != index) here.push_back(index);
            });
        });
    }
    num_needs_ = static_cast<std::size_t>(std::count(is_needed.begin(), is_needed.end(), 1));
    needs_ = std::make_unique<Need[]>(num_needs_);
    std::size_t place = 0;
    for (std::uint64_t chunk = 0; chunk < is_needed.size(); ++chunk) {
        if (is_needed[chunk] == 0) continue;
        needs_[place].chunk = chunk;
        needs_[place++].copies = std::move(by_chunk[chunk]);
    }
}

std::vector<Range> FilePlan::left() const {
    std::vector<Range> runs;
    for (std::size_t i = 0; i < num_needs_; ++i) {
        const std::uint64_t chunk = needs_[i].chunk;
        if (needs_[i].state.load() != State::left) continue;
        if (!runs.empty() && runs.back().second == chunk)
            ++runs.back().second;
        else
            runs.emplace_back(chunk, chunk + 1);
    }
    return runs;
}

std::vector<std::uint64_t> FilePlan::bad_chunks() const {
    std::vector<std::uint64_t> chunks;
    for (std::size_t i = 0; i < num_needs_; ++i) {
        if (needs_[i].state.load() == State::bad) chunks.push_back(needs_[i].chunk);
    }
    return chunks;
}

FilePlan::Need* FilePlan::need_of(std::uint64_t chunk) {
    Need* const end = needs_.get() + num_needs_;
    Need* found = std::lower_bound(needs_.get(), end, chunk,
                                   [](const Need& need, std::uint64_t at) { return need.chunk < at; });
    return found != end && found->chunk == chunk ? found : nullptr;
}

void FilePlan::take(Need& need, const std::uint8_t* data) {
    std::shared_lock lock(writing_);
    if (is_closed()) return;
    bool is_right = audit_.add(need.chunk, data) == checksums_[need.chunk];
    if (is_right) {
        const std::uint64_t begin = need.chunk * geometry_.chunk_bytes;
        const Window window{data, begin, begin + geometry_.bytes_of(need.chunk)};
        for (std::uint32_t index : need.copies)
            copy_common(copies_[index], 0, copies_[index].source, copies_[index].target, window);
    }
    need.state.store(is_right ? State::done : State::bad);
    report_progress(progress_, geometry_.bytes_of(need.chunk));
}

void FilePlan::close() {
    is_closed_.store(true);
    std::unique_lock lock(writing_);
}

void FilePlan::add(std::uint64_t chunk, const std::uint8_t* data) {
    Need* need = need_of(chunk);
    std::uint8_t expected = State::left;
    if (need != nullptr && need->state.compare_exchange_strong(expected, State::begun)) take(*need, data);
}

Error FilePlan::read(const std::string& path, int threads) {
    Fd fd;
    if (Error error = open_to_read(path, fd)) return error;
    std::uint64_t size = 0;
    if (Error error = regular_size(fd.get(), path, size)) return error;
    if (size != geometry_.num_bytes) {
        return value_error(path + " has " + std::to_string(size) + " bytes where " +
                           std::to_string(geometry_.num_bytes) + " were written");
    }
    BlockFile file(std::move(fd), path);
    file.ask_direct(direct_);
    std::vector<Need*> needs;
    for (std::size_t i = 0; i < num_needs_; ++i) {
        if (needs_[i].state.load() == State::left) needs.push_back(&needs_[i]);
    }
    auto closed = [&]() -> Error {
        return is_closed() ? os_error(ECANCELED, "what is read is not needed any more", path) : Error{};
    };
    auto make = [&]() -> ChunkWork {
        auto buffer = std::make_shared<Mapping>();
        const Error failed = Mapping::anonymous(geometry_.chunk_bytes, *buffer);
        return [&, buffer, failed](std::uint64_t index) -> Error {
            Need& need = *needs[index];
            if (failed) return failed;
            if (Error error = closed()) return error;
            const std::uint64_t num_bytes = geometry_.bytes_of(need.chunk);
            const std::uint64_t offset = need.chunk * geometry_.chunk_bytes;
            std::uint8_t* const data = buffer->data();
            if (Error error = file.read(data, num_bytes, round_up(num_bytes, kPage), offset)) return error;
            take(need, data);
            return closed();
        };
    };
    return each_chunk(needs.size(), std::min(requests_in_flight(threads), kMostBuffers), make);
}

} // namespace flashckpt
