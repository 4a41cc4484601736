// A rank's communicator: its segment, its errors and the order of its kernels.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "fakecuda/nccl/datatype.h"
#include "fakecuda/nccl/declarations.h"
#include "fakecuda/nccl/segment.h"

// The object behind an ncclComm_t. It is never freed, so that the use of a destroyed or aborted communicator is an
// error and no crash.
struct ncclComm {
  // Create a communicator on the current device, which is not initialised yet.
  explicit ncclComm(bool blocking);
  ncclComm(const ncclComm&) = delete;

  // --- initialisation
  // Join the ranks that give the same name.
  ncclResult_t initialise(const std::string& name, int ranks, int rank);
  // Run a job: on this thread for a blocking communicator, else on a thread of its own while the communicator is
  // ncclInProgress (NCCL user guide, Creating a Communicator With Options, blocking=0).
  ncclResult_t run_job(std::function<ncclResult_t()> job);
  // Exchange a message with all ranks, on the host.
  ncclResult_t exchange(const fakenccl::HostMessage& own, std::vector<fakenccl::HostMessage>* all);

  // --- errors
  ncclResult_t check_usable();
  ncclResult_t async_error();
  void set_async_error(ncclResult_t error, const std::string& message);
  std::string error_message();
  // Return whether a rank can send nothing more, and why.
  bool is_gone(int rank) const;
  std::string why_gone(int rank) const;

  // --- kernels, in the order in which the host issued them
  uint64_t issue();
  // Let `kernel` run: where no other one does, and, unless its ticket is 0, all issued before it have ended.
  bool begin(const void* kernel, uint64_t ticket);
  // End a kernel. Return whether others are pending.
  bool retire(const void* kernel, uint64_t ticket);
  // Wait until the issued kernels have ended, and in wait_idle for the job too.
  ncclResult_t wait_kernels();
  ncclResult_t wait_idle();

  // --- end
  void leave(fakenccl::Membership how);
  // Have the other ranks look at their kernels.
  void ring_peers();

  int ranks = 0;
  int rank = 0;
  const bool blocking;
  int device = 0;
  std::string bus_id;
  std::string name;  // of the segment

  std::mutex data_mutex;                                    // held while a kernel makes progress
  std::atomic<std::shared_ptr<fakenccl::Segment>> segment;  // empty before initialisation and after the end
  std::atomic<bool> ended{false};                           // aborted or destroyed
  std::atomic<bool> revoked{false};                         // its kernels end at once, and no others are accepted
  uint64_t next_chunk = 0;                                  // of the collectives
  std::vector<uint64_t> next_send, next_receive;            // messages, by peer

  std::mutex issue_mutex;  // guards what follows
  uint64_t collectives_issued = 0;
  uint64_t collectives_discarded = 0;
  std::vector<uint64_t> sends_issued, receives_issued;
  std::vector<fakenccl::Reduction> reductions;  // user-defined
  std::vector<ncclDataType_t> reduction_types;
  int children = 0;
  bool finalized = false;
  bool suspended = false;

 private:
  ncclResult_t join(const std::string& name);
  void watch_peers();
  ncclResult_t wait_for_messages(const fakenccl::Segment& shared, bool (*enough)(const fakenccl::RankSlot&, uint64_t),
                                 uint64_t number);

  std::mutex state_mutex_;
  std::condition_variable changed_;
  uint64_t issued_ = 0;
  uint64_t first_ = 1;  // the ticket of the first kernel that has not ended
  std::set<uint64_t> retired_;
  const void* running_ = nullptr;
  bool idle_locked() const { return first_ > issued_ && running_ == nullptr; }
  ncclResult_t error_ = ncclSuccess;
  std::string message_;
  bool starting_ = true;  // not initialised yet
  bool job_runs_ = false;
  uint64_t host_messages_ = 0;
  std::vector<uint64_t> watches_;
  std::unique_ptr<std::atomic<bool>[]> dead_;
};

namespace fakenccl {

// Check a handle that the program passes.
ncclResult_t check_handle(ncclComm_t communicator);

}  // namespace fakenccl
