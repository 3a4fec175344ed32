// The thread that seals slots. Owns the order of a seal: copies done, digests there, checksums written, then
// the word. Never takes the interpreter's lock. See docs/format.md for the record.
#pragma once

#include "base/error.h"
#include "sync/event.h"

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace flashckpt {

// The sealed record: XXH3-128 of the metadata, fields, XXH3-128 of all before it.
constexpr std::uint64_t kRecordBytes = 256;
constexpr std::uint64_t kChecksumBytes = 16;

// Bytes that are put in their place once all waits are over, before the digests are looked at.
struct Move {
    std::uint64_t source = 0;
    std::uint64_t destination = 0;
    std::uint64_t num_bytes = 0;
};

// All addresses must stay mapped until the seal is done or refused.
struct Seal {
    std::vector<std::uint64_t> waits; // handles
    std::uint64_t word = 0;           // address of the slot's word
    std::uint64_t expected = 0;       // its value while the slot is written
    std::uint64_t desired = 0;        // its value when sealed
    std::uint64_t record = 0;
    std::uint64_t metadata = 0;
    std::uint64_t metadata_bytes = 0;
    std::uint64_t table = 0; // digests, u64[table_count]
    std::uint64_t table_count = 0;
    std::uint64_t on_done_word = 0; // 0, or an address whose u64 grows by one when this seal is decided
    std::vector<Move> moves;
    // What the last entries of the table must be: digests of bytes that stand elsewhere.
    std::vector<std::uint64_t> held;
};

struct SealFailure {
    std::uint64_t word = 0; // its address
    std::string why;
    bool copied = true; // all waits were over: an entry of the table that is empty is to blame
};

class Sealer {
  public:
    Sealer();
    ~Sealer();
    Sealer(const Sealer&) = delete;
    Sealer& operator=(const Sealer&) = delete;

    // Never blocks. An error for an unknown handle or after `close`. With nothing to wait for, and nothing
    // submitted before that is undecided, it is sealed here and now: a thread that gets no turn on a busy
    // machine would leave snapshots unsealed that are whole.
    Error submit(Seal seal);
    // True when all that was submitted is decided, false if that takes longer.
    bool drain(double timeout_s);
    // Ends the thread. What is still waiting is given up: its slots stay as they are, since their copies may
    // still run, and count as failures.
    void close();
    std::vector<SealFailure> failures();

  private:
    struct Pending;
    struct State;

    State& here(); // the state of this process; needs the bell's lock
    // Gives the item to the thread; or leaves it, to be sealed by the caller, and sets `at_once`.
    Error enqueue(std::unique_ptr<Pending>& item, State*& at_once);
    static void serve(State& state);

    State* state_;
};

} // namespace flashckpt
