// The order in which operations take effect: of one client by sequence number, of all clients on one key by turn.
//
// A client sends an operation without waiting for the one before it, and messages may overtake each other on their way.
// So each entry names the operation on the same key that comes before it (`after`), and waits here until that one has
// its turn. An operation that has timed out at the client may still be on its way: in a socket of a service that was
// stopped, say. It is dropped when it arrives after its deadline, or after a later change of the same key.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "store/wire/message.h"

namespace rpc_ext::store {

class KeyQueues;

using Begin = std::function<void()>;  // begins an operation; it must not throw

// Runs functions one after the other, those included that they add: a long chain of operations takes no stack.
//
// Lock: mutex_ guards the functions; nothing is taken under it.
class Begins {
 public:
  // Runs the functions, or leaves them to the call that runs others now.
  void run(std::vector<Begin>&& functions);

 private:
  std::mutex mutex_;
  std::deque<Begin> functions_;
  bool is_running_ = false;
};

// The offset of the service's clock to a client's, which have different origins.
//
// The least difference between the arrival of a request and its sending is the offset plus the fastest way of a
// request. So a deadline that is measured by it is never too early while the clocks run alike. They do not: a machine
// that is suspended stops its clock, and clocks drift. So the minimum is over the requests of the last window only, and
// those of the window before it, which ends when the first request after it arrives: a burst of requests that were held
// up is measured by those before the burst.
class ClockOffset {
 public:
  static constexpr double window = 5;  // seconds: requests count as late for at most twice as long after a suspension

  // Takes a request that was sent at `sent` on the client's clock and has arrived at `arrived` on the service's.
  void add(double arrived, double sent);

  double seconds() const { return std::min(recent_, before_); }

 private:
  static constexpr double none = std::numeric_limits<double>::infinity();

  double begun_ = -none;                  // when the last window began
  double recent_ = none, before_ = none;  // the least difference of the last window and of the one before it
};

// The operations of one client, as they arrive.
//
// Lock: mutex_ guards what follows it; nothing is taken under it.
class RequestOrder {
 public:
  // Called once, when an operation has its turn, or with the reason why it does not take effect. It must not throw.
  using Turn = std::function<void(std::optional<Problem>)>;

  // `sent`: the client's clock when it asked for its session. `late`: counts the operations that are dropped.
  RequestOrder(double sent, std::shared_ptr<std::atomic<std::uint64_t>> late);

  // Takes the client's clock and its lowest sequence number that is not done, as a request names them.
  void note_arrival(double sent, std::uint64_t oldest);

  // Enters an operation, and after it the ones that wait for it, into the queue of its key. A change that has its turn
  // without a problem ends it by queues.leave(). `turn` keeps the entry, the queues and this object alive.
  void enqueue(const KeyEntry& entry, KeyQueues& queues, bool is_change, Turn turn);

  // True: the operation may begin. Otherwise `begin` is called when the operation before it has its turn.
  bool arrive(const std::string& key, std::uint64_t after, Begin begin);

  // Notes that an operation changes its key. False: a later change has superseded it. Operations without a deadline are
  // not noted: their client does not give them up, so they arrive in order.
  bool note_change(const std::string& key, std::uint64_t sequence, double expires);

  // Begins the operations that wait for this one, which has its turn.
  void pass_on(const std::string& key, std::uint64_t sequence);

  // Begins all operations that wait, and from now on each as it arrives: the session has ended, so those before them do
  // not arrive any more.
  void end();

  // Returns the problem of an operation after its deadline, which is dropped then; none: it is in time.
  std::optional<Problem> late(double expires);

  // Returns the seconds until a deadline of the client, which may be negative; infinity: there is none.
  double left(double expires) const;

  std::size_t remembered() const;  // operations and changes that later ones may refer to

 private:
  struct Change {
    std::uint64_t sequence;
    double expires;
  };
  struct Queued {
    const KeyEntry& entry;
    KeyQueues& queues;
    bool is_change;
    Turn turn;
  };
  using QueuedPtr = std::shared_ptr<const Queued>;

  void enter(const QueuedPtr& queued);
  void take_turn(const Queued& queued);
  void purge();

  const std::shared_ptr<std::atomic<std::uint64_t>> late_;
  Begins begins_;
  mutable std::mutex mutex_;
  ClockOffset offset_;
  std::uint64_t oldest_ = 0;  // lowest sequence number of an operation that is not done at the client
  std::unordered_map<std::string, std::uint64_t> latest_;  // by key: the last operation that has its turn
  std::unordered_map<std::string, Change> changes_;        // by key: the last change, and when it expires
  // By key: the operations that wait for another one, by the number of that one, in the order of their arrival.
  std::unordered_map<std::string, std::multimap<std::uint64_t, Begin>> early_;
  std::size_t until_purge_;
  bool has_ended_ = false;
};

// One queue for each key that is being changed: changes one by one, reads when the changes before them are done.
//
// Lock: mutex_ guards the queues; nothing is taken under it.
class KeyQueues {
 public:
  // True: the operation has its turn now. Otherwise `begin` is called when it has.
  bool enter(const std::string& key, bool is_change, Begin begin);

  // Ends the change that had its turn on the key, and begins the operations behind it.
  void leave(const std::string& key);

 private:
  struct Waiting {
    bool is_change;
    Begin begin;
  };

  Begins begins_;
  std::mutex mutex_;
  std::unordered_map<std::string, std::deque<Waiting>> waiting_;
};

}  // namespace rpc_ext::store
