// Findings that have not been taken yet: one for each pair of places, however many bytes and tensors they share. Its
// bytes are those of the first later work that was found.
// Sentences are made when a finding is taken, since a Site may not be written out under the lock.
//
// Findings after the first kMostFindings are dropped, since a program could race at ever new places.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "machine/shadow.h"
#include "machine/site.h"

namespace machine {

constexpr std::size_t kMostFindings = 1000;

// A finding, ready to be shown. Stacks are in `earlier` and `later`; either may be null.
struct Report {
  enum class Kind : std::uint8_t { race, reuse, host_race, wrong_device, error };
  Kind kind = Kind::race;
  std::string summary;  // one sentence: the two accesses, their agents, the bytes, and the missing wait
  SitePtr earlier;
  SitePtr later;
};

const char* name_of(Report::Kind kind) noexcept;

struct Finding {
  bool has_conflict() const noexcept { return conflict.earlier.exists(); }

  Conflict conflict;
  std::string earlier_agent;  // "stream 3 of sim:0", "the host"
  std::string later_agent;
  std::size_t bytes = 0;
  Report report;           // if there is no conflict: the finding as it was reported
  int broken_device = -1;  // of an error
};

// The sentence, and its sites. Not under the lock.
Report describe(Finding&& finding);

class Findings {
 public:
  // Adds a conflict, or merges it into the finding of the same two places.
  void add(Conflict&& conflict, const std::string& earlier_agent, const std::string& later_agent);
  void add(Report&& report, int broken_device = -1);
  std::vector<Finding> take_errors_of(int device);
  std::vector<Finding> take();
  std::size_t count() const noexcept { return count_.load(std::memory_order_acquire); }

 private:
  bool is_full() const noexcept { return found_.size() >= kMostFindings; }
  bool merge(const Conflict& conflict);  // returns false if there is no finding of its places

  std::vector<Finding> found_;
  std::atomic<std::size_t> count_{0};
};

}  // namespace machine
