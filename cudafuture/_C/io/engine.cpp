#include "io/engine.h"

#include <algorithm>
#include <cerrno>
#include <list>
#include <utility>

#include "core/error.h"
#include "core/process.h"
#include "io/counter.h"
#include "io/failure.h"
#include "io/ring.h"
#include "io/threads.h"

namespace cudafuture::io {
namespace {

// All running engines, for the exit of the process. Leaked: engines may live until the end of the process.
struct RunningEngines {
  std::mutex mutex;
  std::list<std::weak_ptr<Engine>> engines;
};
RunningEngines& running() {
  static auto* const running = new RunningEngines;
  return *running;
}

}  // namespace

// ---- begin and end

std::shared_ptr<Engine> Engine::start(const Options& options) {
  refuse_after_fork();
  mark_used();
  std::shared_ptr<Engine> engine(new Engine(options));
  engine->self_ = engine;
  {
    RunningEngines& all = running();
    std::lock_guard lock(all.mutex);
    all.engines.remove_if([](const std::weak_ptr<Engine>& other) { return other.expired(); });
    all.engines.push_back(engine);
  }
  at_shut_down(close_all);
  const ThreadCache::Run run = ThreadCache::get().run(engine.get());
  if (run != ThreadCache::Run::begun) {
    engine->self_ = nullptr;
    if (run == ThreadCache::Run::no_thread) throw no_thread("an I/O engine");
    throw Error(ErrorKind::invalid_state, "the process is exiting: no I/O engine can be started");
  }
  std::unique_lock lock(engine->mutex_);
  engine->changed_.wait(lock, [&] { return engine->is_set_up_ || engine->has_ended_; });
  if (!engine->is_set_up_) throw Failure("no I/O engine: " + engine->why_not_, ENOSYS, "");
  return engine;
}

Engine::Engine(const Options& options)
    : options_(options),
      buffers_(options.queue_depth * options.block_size),
      blocks_(options.queue_depth),
      most_for_devices_(
          std::max<std::size_t>(1, options.queue_depth - std::max<std::size_t>(1, options.queue_depth / 4))) {
  free_.reserve(blocks_.size());
  arrived_.reserve(blocks_.size());
  landed_.reserve(blocks_.size());
  checked_.reserve(2 * Copier::kEnough);  // each round collects them, and gives the copier one more
  landed_checks_.reserve(2 * Copier::kEnough);
  for (std::size_t i = blocks_.size(); i-- > 0;) {
    blocks_[i].buffer_size = options.block_size;
    free_.push_back(&blocks_[i]);
  }
  for (Block& block : blocks_) arrivals_.emplace_back(static_cast<Watching&>(*this), block);
}

Engine::~Engine() = default;

void Engine::close() noexcept {
  if (is_forked_child()) return;
  {
    std::lock_guard lock(mutex_);
    is_closed_ = true;
    wants_work_ = false;
    if (std::exchange(is_waiting_, false)) backend_->wake();
  }
  changed_.notify_all();
}

void Engine::release_held() noexcept {
  std::lock_guard lock(mutex_);
  if (faults_ != nullptr) faults_->release_held();
}

void Engine::join() noexcept {
  if (is_forked_child()) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return has_ended_; });
}

bool Engine::join_until(Clock::time_point deadline) noexcept {
  if (is_forked_child()) return true;
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [this] { return has_ended_; });
}

void Engine::close_all() noexcept {
  std::list<std::weak_ptr<Engine>> engines;
  {
    RunningEngines& all = running();
    std::lock_guard lock(all.mutex);
    engines.swap(all.engines);
  }
  for (const std::weak_ptr<Engine>& other : engines) {
    if (const std::shared_ptr<Engine> engine = other.lock()) engine->close();
  }
}

bool Engine::set_up() noexcept {
  try {
    if (options_.backend != BackendKind::threads) backend_ = make_ring(blocks_.size(), why_not_);
    if (backend_ == nullptr) {
      if (options_.backend == BackendKind::io_uring) return false;
      backend_ = std::make_unique<Threads>(options_.threads);
    }
    if (options_.faults) {
      auto faults = std::make_unique<Faults>(std::move(backend_), *options_.faults);
      faults_ = faults.get();
      backend_ = std::move(faults);
    }
    backend_name_ = backend_->name();
    aim_blocks_at_buffers();
    return true;
  } catch (const std::exception& e) {
    why_not_ = e.what();
    return false;
  }
}

void Engine::aim_blocks_at_buffers() noexcept {
  backend_->use_buffers(buffers_.data(), buffers_.size());
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    blocks_[i].buffer = buffers_.data() + i * options_.block_size;
    if (!buffers_.are_pinned()) continue;
    const auto size = static_cast<std::int64_t>(options_.block_size);
    blocks_[i].pinned = buffers_.pinned().narrow(0, static_cast<std::int64_t>(i) * size, size);
  }
}

void Engine::perform() noexcept {
  const std::shared_ptr<Engine> self = std::move(self_);
  const bool works = set_up();
  if (works) {
    {
      std::lock_guard lock(mutex_);
      is_set_up_ = true;
    }
    changed_.notify_all();
    copier_.emplace(static_cast<Watching&>(*this));
    loop();
    copier_.reset();
  }
  std::unique_ptr<Backend> backend;
  {
    std::lock_guard lock(mutex_);
    backend.swap(backend_);
    faults_ = nullptr;
    is_waiting_ = wants_work_ = false;
  }
  backend = nullptr;
  {
    std::lock_guard lock(mutex_);
    has_ended_ = true;
  }
  changed_.notify_all();
}

// ---- operations

void Engine::submit(Request&& request, Full when_full) {
  refuse_after_fork();
  auto operation = std::make_unique<Operation>(std::move(request));
  {
    std::unique_lock lock(mutex_);
    if (when_full == Full::wait) changed_.wait(lock, [this] { return has_room(); });
    if (is_closed_) throw Error(ErrorKind::invalid_state, "the I/O engine is closed");
    ++pending_;
  }
  if (operation->waits_for_source()) {
    watch_source(*this, operation.release());
  } else {
    put_in(operation.release());
  }
}

bool Engine::wait_for_room(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [this] { return has_room(); });
}

void Engine::put_in(Operation* operation) noexcept {
  std::lock_guard lock(mutex_);
  inbox_.push(operation);
  if (!std::exchange(wants_work_, false)) return;
  is_waiting_ = false;
  backend_->wake();
}

void Engine::loop() noexcept {
  std::vector<Block*> ended;
  ended.reserve(blocks_.size());
  while (true) {
    if (collect()) return;
    for (Block* const block : landed_) land(*block);
    landed_.clear();
    for (Operation* const operation : landed_checks_) end_check(operation);
    landed_checks_.clear();
    cut_blocks();
    check_some();
    bool may_block;
    {
      std::lock_guard lock(mutex_);
      may_block = !is_over() && arrived_.empty() && checked_.empty() && checks_.size() == 0 &&
                  (inbox_.empty() || free_.empty());
      is_waiting_ = may_block;
      wants_work_ = may_block && !free_.empty();
    }
    backend_->wait(may_block, ended);
    for (Block* const block : ended) take(*block);
    ended.clear();
  }
}

// Collects the work that other threads have left. True: the engine ends.
bool Engine::collect() noexcept {
  std::lock_guard lock(mutex_);
  is_waiting_ = wants_work_ = false;
  while (!inbox_.empty()) {
    queues_.push(inbox_.pop(), options_.block_size);
  }
  if (is_over()) return true;
  landed_.swap(arrived_);
  landed_checks_.swap(checked_);
  return false;
}

void Engine::cut_blocks() noexcept {
  while (!free_.empty()) {
    OperationList* const queue = queues_.next(blocks_for_devices());
    if (queue == nullptr) return;
    Operation* const operation = queue->head();
    pin_buffers_for(*operation);
    if (!operation->begin()) {
      end(Queues::pop(*queue));
      continue;
    }
    if (operation->has_next()) cut_block(*operation);
    if (operation->has_next()) continue;
    Queues::pop(*queue);
    if (operation->is_over()) end(operation);
  }
}

Queues::ForDevices Engine::blocks_for_devices() const noexcept {
  if (of_devices_ >= most_for_devices_) return Queues::ForDevices::none;
  const bool has_buffers = buffers_.are_pinned() || free_.size() == blocks_.size();
  return has_buffers ? Queues::ForDevices::some : Queues::ForDevices::later;
}

void Engine::pin_buffers_for(Operation& operation) noexcept {
  if (operation.device() == nullptr || buffers_.are_pinned()) return;
  try {
    buffers_.pin();
    aim_blocks_at_buffers();
  } catch (...) {
    operation.abandon(std::current_exception());
  }
}

void Engine::cut_block(Operation& operation) noexcept {
  Block& block = *free_.back();
  free_.pop_back();
  block.is_of_device = operation.device() != nullptr;
  if (block.is_of_device) ++of_devices_;
  add(counters_.blocks);
  const Operation::Outcome outcome = operation.next(block);
  if (block.is_staged) add(counters_.staged);
  note_check(operation, block);
  pass_on(block, outcome);
}

void Engine::take(Block& block) noexcept {
  Operation* const operation = block.operation;
  const Operation::Outcome outcome = operation->take(block);
  if (outcome == Operation::Outcome::kernel) add(counters_.again);
  note_check(*operation, block);
  pass_on(block, outcome);
  if (operation->is_over()) end(operation);
}

void Engine::pass_on(Block& block, Operation::Outcome outcome) noexcept {
  if (outcome == Operation::Outcome::host) {
    block.is_with_copier = is_busy() && copier_->take(block);
    if (block.is_with_copier) return;
    if (block.wanted >= Block::kLong) backend_->begin();
    block.operation->stage(block);
    outcome = block.operation->staged(block);
  }
  switch (outcome) {
    case Operation::Outcome::kernel:
      return backend_->put(block);
    case Operation::Outcome::ended:
      return free_block(block);
    case Operation::Outcome::device:
      add(counters_.copied);
      return arrivals_[static_cast<std::size_t>(&block - blocks_.data())].watch();
    case Operation::Outcome::host:
      break;
  }
}

void Engine::free_block(Block& block) noexcept {
  if (block.is_of_device) --of_devices_;
  free_.push_back(&block);
}

void Engine::arrived(Block& block) noexcept {
  std::lock_guard lock(mutex_);
  arrived_.push_back(&block);
  wake();
}

void Engine::checked(Operation* operation) noexcept {
  std::lock_guard lock(mutex_);
  checked_.push_back(operation);
  wake();
}

// Called under the lock.
void Engine::wake() noexcept {
  if (!std::exchange(is_waiting_, false)) return;
  wants_work_ = false;
  backend_->wake();
}

void Engine::note_check(Operation& operation, Block& block) noexcept {
  if (!std::exchange(block.is_unchecked, false) || checks_.push({&operation, block.at, block.wanted})) return;
  operation.check(block.at, block.wanted);
  operation.checked();
}

// Takes one checksum, or two if the copier helps: then the kernel may have room for more requests.
void Engine::check_some() noexcept {
  if (checks_.size() > 1 && copier_->take(checks_.last())) checks_.drop_last();
  if (checks_.size() == 0) return;
  backend_->begin();
  const Check check = checks_.pop_first();
  check.operation->check(check.at, check.size);
  end_check(check.operation);
}

void Engine::end_check(Operation* operation) noexcept {
  operation->checked();
  if (operation->is_over()) end(operation);
}

// The copier or the devices have finished with the block.
void Engine::land(Block& block) noexcept {
  Operation* const operation = block.operation;
  if (operation == nullptr) {
    block.copied = nullptr;
    return free_block(block);
  }
  const bool was_with_copier = std::exchange(block.is_with_copier, false);
  pass_on(block, was_with_copier ? operation->staged(block) : operation->copied(block));
  if (operation->is_over()) end(operation);
}

void Engine::end(Operation* operation) noexcept {
  const bool is_read = operation->direction() == Direction::read;
  add(is_read ? counters_.reads : counters_.writes);
  if (operation->has_succeeded()) add(is_read ? counters_.bytes_read : counters_.bytes_written, operation->size());
  bool tells;
  {
    std::lock_guard lock(mutex_);
    tells = options_.max_pending != 0 && pending_ >= options_.max_pending;
    --pending_;
  }
  if (tells) changed_.notify_all();
  operation->finish();
  delete operation;
}

Engine::Statistics Engine::statistics() const noexcept {
  const auto& [reads, writes, bytes_read, bytes_written, blocks, again, staged, copied] = counters_;
  std::lock_guard lock(mutex_);
  return {reads, writes, bytes_read, bytes_written, blocks, again, staged, copied, pending_};
}

}  // namespace cudafuture::io
