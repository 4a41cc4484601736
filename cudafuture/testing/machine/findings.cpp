#include "machine/findings.h"

#include <algorithm>
#include <iterator>

namespace machine {
namespace {

bool same_place(const Touch& a, const Touch& b) {
  return a.epoch == b.epoch || (a.site != nullptr && b.site != nullptr && a.site->place() == b.site->place());
}

std::string operation_of(const Touch& touch) {
  if (touch.site != nullptr) return touch.site->operation();
  return touch.allocates ? "an allocation" : touch.epoch.agent == kHost ? "a CPU operation" : "work";
}

Report::Kind kind_of(const Conflict& conflict) {
  if (conflict.later.allocates) return Report::Kind::reuse;
  return conflict.later.epoch.agent == kHost ? Report::Kind::host_race : Report::Kind::race;
}

std::string verb_of(const Touch& touch) { return touch.allocates ? "allocates" : touch.writes ? "writes" : "reads"; }

std::string reuse_of(const std::string& earlier, const std::string& later, const std::string& earlier_agent,
                     const std::string& bytes) {
  return later + " hands out " + bytes + " again that " + earlier + " may still use: the memory was freed without " +
         "record_stream() for " + earlier_agent + ", or without a wait for it";
}

// The host is the later side: a stream has seen what the host did before it submitted.
std::string host_race_of(const Finding& f, const std::string& earlier, const std::string& later,
                         const std::string& bytes) {
  return later + " " + verb_of(f.conflict.later) + " " + bytes + " of pinned memory that " + earlier + " " +
         verb_of(f.conflict.earlier) + ", which may not have finished: the host must first synchronize with " +
         f.earlier_agent;
}

std::string race_of(const Finding& f, const std::string& earlier, const std::string& later, const std::string& bytes) {
  return later + " " + verb_of(f.conflict.later) + " " + bytes + " that " + earlier + " " +
         verb_of(f.conflict.earlier) + ", and nothing orders the two: " + f.later_agent +
         " must wait for an event recorded on " + f.earlier_agent + " after " + operation_of(f.conflict.earlier);
}

}  // namespace

const char* name_of(Report::Kind kind) noexcept {
  switch (kind) {
    case Report::Kind::race:
      return "race";
    case Report::Kind::reuse:
      return "reuse";
    case Report::Kind::host_race:
      return "host_race";
    case Report::Kind::wrong_device:
      return "wrong_device";
    case Report::Kind::error:
      return "error";
  }
  return "?";
}

Report describe(Finding&& f) {
  const Conflict& conflict = f.conflict;
  if (!f.has_conflict()) return std::move(f.report);
  const std::string earlier = operation_of(conflict.earlier) + " on " + f.earlier_agent;
  const std::string later = operation_of(conflict.later) + " on " + f.later_agent;
  const std::string bytes = std::to_string(f.bytes) + (f.bytes == 1 ? " byte" : " bytes");
  Report report;
  report.kind = kind_of(conflict);
  switch (report.kind) {
    case Report::Kind::reuse:
      report.summary = reuse_of(earlier, later, f.earlier_agent, bytes);
      break;
    case Report::Kind::host_race:
      report.summary = host_race_of(f, earlier, later, bytes);
      break;
    default:
      report.summary = race_of(f, earlier, later, bytes);
  }
  report.earlier = std::move(f.conflict.earlier.site);
  report.later = std::move(f.conflict.later.site);
  return report;
}

// Adds the bytes if they are more bytes of the same later work.
bool Findings::merge(const Conflict& conflict) {
  const auto same = [&](const Finding& f) {
    return same_place(f.conflict.earlier, conflict.earlier) && same_place(f.conflict.later, conflict.later);
  };
  const auto known = std::find_if(found_.rbegin(), found_.rend(), same);
  if (known == found_.rend()) return false;
  const bool elsewhere = conflict.end <= known->conflict.begin || known->conflict.end <= conflict.begin;
  const bool is_same_work = known->conflict.later.epoch == conflict.later.epoch;
  if (elsewhere && is_same_work) known->bytes += conflict.end - conflict.begin;
  return true;
}

void Findings::add(Conflict&& conflict, const std::string& earlier_agent, const std::string& later_agent) {
  if (merge(conflict) || is_full()) return;
  const std::size_t bytes = conflict.end - conflict.begin;
  found_.push_back({std::move(conflict), earlier_agent, later_agent, bytes, {}, -1});
  count_.store(found_.size(), std::memory_order_release);
}

void Findings::add(Report&& report, int broken_device) {
  if (is_full()) return;
  found_.push_back({{}, {}, {}, 0, std::move(report), broken_device});
  count_.store(found_.size(), std::memory_order_release);
}

std::vector<Finding> Findings::take() {
  count_.store(0, std::memory_order_release);
  return std::exchange(found_, {});
}

std::vector<Finding> Findings::take_errors_of(int device) {
  const auto is_other = [&](const Finding& f) { return f.broken_device != device; };
  const auto first = std::stable_partition(found_.begin(), found_.end(), is_other);
  std::vector<Finding> taken(std::make_move_iterator(first), std::make_move_iterator(found_.end()));
  found_.erase(first, found_.end());
  count_.store(found_.size(), std::memory_order_release);
  return taken;
}

}  // namespace machine
