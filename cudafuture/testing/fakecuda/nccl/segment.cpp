#include "fakecuda/nccl/segment.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "fakecuda/nccl/error.h"
#include "fakecuda/nccl/process.h"

namespace fakenccl {
namespace {

constexpr char kPrefix[] = "fakenccl-";

struct alignas(64) Header {
  std::atomic<int32_t> ranks;
  std::atomic<int32_t> joined;
};

size_t aligned(size_t size) { return (size + 4095) / 4096 * 4096; }

}  // namespace

size_t Segment::size() const {
  const size_t n = ranks_;
  const size_t slots = sizeof(Header) + n * sizeof(RankSlot) + n * n * sizeof(PairSlot);
  return aligned(slots) + n * 2 * kChunkSize + n * n * kRingSize + 4096;
}

RankSlot& Segment::slot(int rank) const { return reinterpret_cast<RankSlot*>(base_ + sizeof(Header))[rank]; }

PairSlot& Segment::pair(int from, int to) const {
  return reinterpret_cast<PairSlot*>(base_ + sizeof(Header) + ranks_ * sizeof(RankSlot))[from * ranks_ + to];
}

char* Segment::chunk(int rank, uint64_t number) const {
  const size_t n = ranks_;
  const size_t slots = sizeof(Header) + n * sizeof(RankSlot) + n * n * sizeof(PairSlot);
  return base_ + aligned(slots) + (rank * 2 + number % 2) * kChunkSize;
}

char* Segment::ring(int from, int to) const {
  return chunk(ranks_, 0) + (static_cast<size_t>(from) * ranks_ + to) * kRingSize;
}

// A file starts as zeros, which is the right state of everything in it, so no rank has to initialise it for others.
// A byte written at the end makes it as long as it has to be and never shorter.
ncclResult_t Segment::map() {
  const std::string path = "/" + name_;
  for (;;) {
    file_ = shm_open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file_ < 0) return fail(ncclSystemError, "shm_open of " + path + " failed: " + strerror(errno));
    struct stat status;
    if (flock(file_, LOCK_SH) == 0 && fstat(file_, &status) == 0 && status.st_nlink > 0) break;
    close(file_);  // removed as abandoned between the two calls
  }
  if (pwrite(file_, "", 1, size() - 1) != 1)
    return fail(ncclSystemError, "No room for " + std::to_string(size()) + " bytes in /dev/shm: " + strerror(errno));
  void* base = mmap(nullptr, size(), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (base == MAP_FAILED) return fail(ncclSystemError, std::string("mmap of a segment failed: ") + strerror(errno));
  base_ = static_cast<char*>(base);
  return ncclSuccess;
}

ncclResult_t Segment::claim(const std::string& bus_id) {
  auto& header = *reinterpret_cast<Header*>(base_);
  int32_t known = 0;
  if (!header.ranks.compare_exchange_strong(known, ranks_) && known != ranks_)
    return fail(ncclInvalidArgument, "Rank " + std::to_string(rank_) + " initialises a communicator of " +
                                         std::to_string(ranks_) + " ranks, but another rank gave " +
                                         std::to_string(known) + ".");
  // The process is known as soon as the rank is claimed, so its death is seen whenever it comes.
  pid_t free = 0;
  RankSlot& slot = own();
  if (!slot.pid.compare_exchange_strong(free, getpid()))
    return fail(ncclInvalidUsage, "Rank " + std::to_string(rank_) + " is used twice in one communicator.");
  slot.started = start_time(getpid());
  snprintf(slot.bus_id, sizeof slot.bus_id, "%s", bus_id.c_str());
  slot.membership.store(Membership::joined);
  // The last rank to come removes the name: from here on the segment ends with the processes that map it.
  if (header.joined.fetch_add(1) + 1 == ranks_) shm_unlink(("/" + name_).c_str());
  return ncclSuccess;
}

std::shared_ptr<Segment> Segment::attach(const std::string& name, int ranks, int rank, const std::string& bus_id,
                                         ncclResult_t* result) {
  std::shared_ptr<Segment> segment(new Segment(kPrefix + name, ranks, rank));
  *result = segment->map();
  if (*result == ncclSuccess) *result = segment->claim(bus_id);
  return *result == ncclSuccess ? segment : nullptr;
}

Segment::~Segment() {
  if (base_ != nullptr) munmap(base_, size());
  if (file_ < 0) return;
  unlink_if_unused();
  close(file_);
}

// Each rank that waits for others holds a shared lock of the file, which ends with its process.
void Segment::unlink_if_unused() {
  if (flock(file_, LOCK_EX | LOCK_NB) == 0) shm_unlink(("/" + name_).c_str());
}

// Return whether a rank has claimed its place and will never finish the initialisation.
bool Segment::is_lost(int rank) const {
  const RankSlot& peer = slot(rank);
  if (peer.membership.load() == Membership::aborted) return true;
  const pid_t pid = peer.pid.load();
  if (pid == 0) return false;
  const uint64_t started = peer.started.load();
  return started == 0 ? start_time(pid) == 0 : !is_alive(pid, started);
}

ncclResult_t Segment::wait_for_ranks(const std::function<bool()>& stop) {
  auto& header = *reinterpret_cast<Header*>(base_);
  for (uint64_t turn = 1; header.joined.load() < ranks_; ++turn) {
    bool stopped = stop();
    std::string message = "The communicator was aborted while it was initialised.";
    for (int rank = 0; turn % 64 == 0 && rank < ranks_ && !stopped; ++rank) {
      if (!is_lost(rank) || header.joined.load() == ranks_) continue;
      stopped = true;
      message = "Rank " + std::to_string(rank) + " (process " + std::to_string(slot(rank).pid) +
                ") died or gave up while the communicator was initialised.";
    }
    if (stopped) {
      own().membership.store(Membership::aborted);
      return fail(stop() ? ncclInternalError : ncclRemoteError, message);
    }
    const timespec pause{0, 200000};
    nanosleep(&pause, nullptr);
  }
  close(file_);
  file_ = -1;
  return check_devices();
}

// NCCL refuses two ranks on one device ("Duplicate GPU detected", NCCL user guide, Creating a Communicator: using the
// same CUDA device multiple times as different ranks is not supported and may lead to hangs).
ncclResult_t Segment::check_devices() const {
  for (int a = 0; a < ranks_; ++a)
    for (int b = a + 1; b < ranks_; ++b)
      if (strcmp(slot(a).bus_id, slot(b).bus_id) == 0)
        return fail(ncclInvalidUsage, "Duplicate GPU detected: rank " + std::to_string(a) + " and rank " +
                                          std::to_string(b) + " are both on the CUDA device with bus id " +
                                          slot(a).bus_id + ". Give each rank a device of its own.");
  return ncclSuccess;
}

void remove_abandoned_segments() {
  DIR* folder = opendir("/dev/shm");
  if (folder == nullptr) return;
  while (const dirent* entry = readdir(folder)) {
    if (strncmp(entry->d_name, kPrefix, sizeof kPrefix - 1) != 0) continue;
    const std::string path = std::string("/") + entry->d_name;
    const int file = shm_open(path.c_str(), O_RDWR | O_CLOEXEC, 0600);
    if (file < 0) continue;
    if (flock(file, LOCK_EX | LOCK_NB) == 0) shm_unlink(path.c_str());
    close(file);
  }
  closedir(folder);
}

}  // namespace fakenccl
