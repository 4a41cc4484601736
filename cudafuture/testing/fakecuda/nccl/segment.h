// The shared memory of a communicator: one file in /dev/shm that all ranks map and that has no name once they have.
//
// No lock lies in it. Each word has one writer, and a rank tells the others of its progress by counters, so a rank that
// is killed at any point leaves nothing behind that another rank could wait for without knowing.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "fakecuda/nccl/declarations.h"

namespace fakenccl {

constexpr size_t kChunkSize = 256 << 10;  // of a rank's contribution to a collective; two of them lie in the segment
constexpr size_t kRingSize = 64 << 10;    // bytes in flight from one rank to another

// An operation as its rank issued it. The ranks compare theirs.
struct Descriptor {
  int32_t kind = 0;
  int32_t type = 0;
  int32_t reduction = 0;
  int32_t root = 0;
  uint64_t count = 0;
  uint64_t number = 0;     // of the operation on its communicator, from 1
  uint64_t discarded = 0;  // empty collectives that the rank issued before it
};

enum class Membership : uint32_t { absent, joined, left, aborted };

// A small message of each rank to all others, for what the host does collectively: ncclCommSplit.
struct HostMessage {
  int32_t color = 0;
  int32_t key = 0;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<pid_t>::is_always_lock_free,
              "Atomic words in shared memory need no lock.");

struct alignas(64) RankSlot {
  std::atomic<pid_t> pid;  // of the process that claimed the rank
  std::atomic<Membership> membership;
  std::atomic<uint64_t> started;  // the start time of the process, which tells it from a later one with the same pid
  char bus_id[32];                // of its device

  alignas(64) std::atomic<uint32_t> rung;  // 1: a message to the rank's doorbell is in flight

  // Chunks of collectives: chunk i lies at i % 2.
  alignas(64) std::atomic<uint64_t> published;
  alignas(64) std::atomic<uint64_t> consumed;
  Descriptor descriptors[2];

  alignas(64) std::atomic<uint64_t> told;
  std::atomic<uint64_t> heard;
  HostMessage messages[2];
};

// The way from one rank to another. Message i has its descriptors at i % 2.
struct alignas(64) PairSlot {
  std::atomic<uint64_t> sends;    // messages whose descriptor the sender has written
  std::atomic<uint64_t> written;  // bytes, since the beginning
  Descriptor send_descriptors[2];
  alignas(64) std::atomic<uint64_t> receives;
  std::atomic<uint64_t> read;
  Descriptor receive_descriptors[2];
};

class Segment {
 public:
  // Map the segment `name` for `ranks` ranks, and claim `rank` in it. Return nullptr and set `result` on failure.
  static std::shared_ptr<Segment> attach(const std::string& name, int ranks, int rank, const std::string& bus_id,
                                         ncclResult_t* result);
  ~Segment();
  Segment(const Segment&) = delete;

  // Wait until all ranks are there. `stop` is called often and ends the wait by returning true.
  ncclResult_t wait_for_ranks(const std::function<bool()>& stop);

  int ranks() const { return ranks_; }
  int rank() const { return rank_; }
  RankSlot& slot(int rank) const;
  RankSlot& own() const { return slot(rank_); }
  PairSlot& pair(int from, int to) const;
  char* chunk(int rank, uint64_t number) const;
  char* ring(int from, int to) const;

 private:
  Segment(std::string name, int ranks, int rank) : name_(std::move(name)), ranks_(ranks), rank_(rank) {}
  ncclResult_t map();
  ncclResult_t claim(const std::string& bus_id);
  ncclResult_t check_devices() const;
  bool is_lost(int rank) const;
  void unlink_if_unused();
  size_t size() const;

  std::string name_;
  int ranks_;
  int rank_;
  int file_ = -1;
  char* base_ = nullptr;
};

// Remove segments that no process holds: those of ranks that were killed while they waited for others.
void remove_abandoned_segments();

}  // namespace fakenccl
