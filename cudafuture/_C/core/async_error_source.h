// An async error source: an engine that may report a failure after it has completed a future. NCCL is one: a collective
// is complete when it is enqueued.
//
//     collective ── source ──┐
//     collective ── source ──┼──► every future whose value was made from them: then(), then_async(), gather() ...
//
// An aborted communicator releases its streams, and the tensors then hold garbage. Finished device work therefore
// proves success only if the source, asked afterwards, reports no failure.
//
// Such an engine also keeps the tensors of its operation until a consumer is ordered after it: consumed() reports that.
#pragma once

#include <exception>
#include <memory>
#include <vector>

namespace cudafuture {

class AsyncErrorSource {
 public:
  virtual ~AsyncErrorSource() = default;

  // Returns the failure, or null while the engine has reported none. Any thread may ask, at any time.
  virtual std::exception_ptr error() noexcept = 0;

  // Decides, after device work that follows the operation has finished, whether the operation succeeded. False: the
  // engine does not know yet. After true, error() does not change any more.
  virtual bool confirm() noexcept { return true; }

  // Returns true if the operation has succeeded for good: error() will always return null.
  virtual bool has_succeeded() const noexcept { return false; }

  // Called when this thread's current streams are ordered after the operation: the engine may release what it keeps for
  // them. Called inside the interpreter, if there is one.
  virtual void consumed() {}
};

// The sources of one future. Filled before the future is done, and only read afterwards.
class AsyncErrors {
 public:
  bool empty() const noexcept { return sources_.empty(); }
  void add(std::shared_ptr<AsyncErrorSource> source);
  void add(const AsyncErrors& others);
  // Returns the sources that have not succeeded for good. Dropping the others keeps a long chain of futures from
  // collecting them.
  AsyncErrors undecided() const;

  std::exception_ptr error() const noexcept;  // the first
  bool confirm() const noexcept;              // all of them
  void consumed() const;                      // all of them

 private:
  std::vector<std::shared_ptr<AsyncErrorSource>> sources_;
};

}  // namespace cudafuture
