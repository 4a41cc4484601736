// The walk over what is pending: from operations and waits, up to what waits for them and down to their parts.
//
//     thread ── waits for ──► gather ── part ──► then ── parent ──► all_reduce #12 of group 'dp' (4 MiB)
//
// The edges from a child to its parent do not exist in memory: the walk finds them at the parents. It takes no lock of
// the interpreter, calls nothing foreign, and holds one lock of the core at a time beside its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/future.h"
#include "core/thread_activity.h"

namespace cudafuture {

// A pending future in the graph, and the reason why it is pending.
struct PendingNode {
  WeakFuture future;
  std::vector<std::uint32_t> waits_for;   // indices of its parts or of its parent
  std::vector<std::uint32_t> blocked_by;  // indices of the threads behind whose callbacks its own callback is queued
  std::int64_t listed = 0;                // how many times a pending combination lists it as a part
  std::int64_t references = 0;            // to its foreign object; known for parts
  bool is_running = false;                // a thread runs its callback
  bool is_due = false;                    // its callback is queued
  bool is_lost = false;                   // only combinations refer to it: nothing can complete it
};

class PendingGraph {
 public:
  enum class From : std::uint8_t {
    roots,       // down to their parts only: a parent is found where an operation leads to it
    operations,  // and from all operations up
    threads,     // and from what threads wait for and run
  };
  // Adds no futures beyond `most`.
  static PendingGraph walk(std::vector<WeakFuture> roots, From from, std::size_t most = SIZE_MAX);
  PendingGraph(PendingGraph&&) = default;
  ~PendingGraph();

  const std::vector<PendingNode>& nodes() const noexcept { return nodes_; }
  const std::vector<ThreadActivities>& threads() const noexcept { return threads_; }
  // Returns the index of a future, or -1.
  std::int64_t index_of(const Future& future) const noexcept;
  // Returns the pending operations, and other futures that wait for nothing known, below a future: some of them.
  std::vector<std::uint32_t> leaves_of(std::uint32_t index, std::size_t most) const;
  bool is_cut() const noexcept { return is_cut_; }
  // Returns words about the callbacks behind which a future's own callback is queued; empty: none.
  std::string blockers(const PendingNode& one) const;
  // Returns words about a future that waits for no other: why it is pending, as far as that is known.
  std::string reason(const PendingNode& one) const;

 private:
  PendingGraph() = default;
  bool add(WeakFuture future, std::uint32_t& index);
  void add_links(std::uint32_t index);
  void find_reasons();

  std::size_t most_ = SIZE_MAX;
  bool is_cut_ = false;  // there were too many
  std::vector<PendingNode> nodes_;
  std::unordered_map<const Future*, std::uint32_t> index_;
  std::vector<ThreadActivities> threads_;
  std::vector<WeakFuture> dropped_;  // not added
};

// Returns a name for messages, also of a future without one.
std::string quoted_name(const std::string& name);

// Returns text for a pending future: its operation, or what made it, its age, and the line that made it if that is
// kept.
std::string description_of(const Future& future);

// Returns the graph as JSON. More futures than `most` are shown in groups of the same kind, with their number. `roots`:
// those whose indices the text names.
std::string as_json(const PendingGraph& graph, std::size_t most, const std::vector<const Future*>& roots = {});

}  // namespace cudafuture
