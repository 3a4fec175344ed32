// The thread that seals slots. Owns the order of a seal: copies done, digests present, checksums written,
// then the state word. Never takes the GIL. See docs/format.md for the record.
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

// The sealed record: XXH3-128 of the metadata, fields, XXH3-128 of all preceding bytes.
constexpr std::uint64_t kRecordBytes = 256;
constexpr std::uint64_t kChecksumBytes = 16;

// Bytes that were copied after their digest was taken: compared with it when all waits are over.
struct Landed {
    std::uint64_t address = 0;
    std::uint64_t num_bytes = 0;
    std::uint64_t entry = 0; // in the table
};

// All addresses must stay mapped until the seal is done or refused.
struct Seal {
    std::vector<std::uint64_t> waits; // handles
    std::uint64_t word = 0;           // address of the slot's word
    std::uint64_t expected = 0;       // value while the slot is written
    std::uint64_t desired = 0;        // value when sealed
    std::uint64_t record = 0;
    std::uint64_t metadata = 0;
    std::uint64_t metadata_bytes = 0;
    std::uint64_t table = 0; // digests, u64[table_count]
    std::uint64_t table_count = 0;
    std::uint64_t on_done_word = 0; // 0, or an address whose u64 grows by one when this seal is decided
    std::vector<Landed> landed;
    // Required values of the last entries of the table: digests of bytes in other regions.
    std::vector<std::uint64_t> held;
};

struct SealFailure {
    std::uint64_t word = 0; // its address
    std::string why;
    bool copied = true; // all waits were over, so the failure is in the table or the word
};

class Sealer {
  public:
    Sealer();
    ~Sealer();
    Sealer(const Sealer&) = delete;
    Sealer& operator=(const Sealer&) = delete;

    // Never blocks. Returns an error for an unknown handle or after `close`. Without waits and without
    // earlier undecided seals, it seals at once in this call: on a busy machine the thread may get no time,
    // and complete snapshots would stay unsealed.
    Error submit(Seal seal);
    // Seals a slot that was submitted with `unconfirmed` as its desired word: now, or when its copies are
    // over. False if the slot holds another snapshot, or none.
    bool confirm(std::uint64_t word, std::uint64_t writing, std::uint64_t unconfirmed, std::uint64_t sealed);
    // Waits until all submitted seals are decided; false on timeout.
    bool drain(double timeout_s);
    // Ends the thread. Seals that still wait fail; their slots are not changed, since their copies may still
    // run.
    void close();
    std::vector<SealFailure> failures();

  private:
    struct Pending;
    struct State;

    State& here(); // the state of this process; needs the bell's lock
    // Passes the item to the thread, or leaves it to be sealed by the caller and sets `at_once`.
    Error enqueue(std::unique_ptr<Pending>& item, State*& at_once);
    static void serve(State& state);

    State* state_;
};

} // namespace flashckpt
