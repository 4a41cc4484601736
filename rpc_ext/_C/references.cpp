#include "references.h"

#include <torch/csrc/distributed/rpc/rref_context.h>

#include <mutex>
#include <utility>

#include "private.h"

namespace rpc_ext {

namespace rpc = torch::distributed::rpc;

struct AgentMember {
  friend auto member(AgentMember);
};
struct MutexMember {
  friend auto member(MutexMember);
};
struct ForksMember {
  friend auto member(ForksMember);
};
struct PendingUsersMember {
  friend auto member(PendingUsersMember);
};
struct ConfirmedUsersMember {
  friend auto member(ConfirmedUsersMember);
};
struct PendingChildrenMember {
  friend auto member(PendingChildrenMember);
};
struct DestroyedMutexMember {
  friend auto member(DestroyedMutexMember);
};
struct DestroyedMember {
  friend auto member(DestroyedMember);
};

template struct Private<AgentMember, &rpc::RRefContext::agent_>;
template struct Private<MutexMember, &rpc::RRefContext::mutex_>;
template struct Private<ForksMember, &rpc::RRefContext::forks_>;
template struct Private<PendingUsersMember, &rpc::RRefContext::pendingUsers_>;
template struct Private<ConfirmedUsersMember, &rpc::RRefContext::confirmedUsers_>;
template struct Private<PendingChildrenMember, &rpc::RRefContext::pendingChildren_>;
template struct Private<DestroyedMutexMember, &rpc::RRefContext::destroyedMutex_>;
template struct Private<DestroyedMember, &rpc::RRefContext::destroyed_>;

namespace {

// While the register counts as destroyed, no message is sent: the reference is only marked. So no message is sent later
// either, to the worker that has the owner's number in the new session.
void forget(const c10::intrusive_ptr<rpc::RRef>& rref) {
  if (rref && !rref->isOwner()) c10::static_intrusive_pointer_cast<rpc::UserRRef>(rref)->tryDel();
}

}  // namespace

void renew_references() {
  auto& context = rpc::RRefContext::getInstance();
  // It is const since torch never does this; the object itself was made with new and is no constant.
  auto& agent = const_cast<std::shared_ptr<rpc::RpcAgent>&>(context.*member(AgentMember{}));
  auto current = rpc::RpcAgent::getCurrentRpcAgent();
  if (agent == current) return;

  {
    const std::lock_guard lock(context.*member(DestroyedMutexMember{}));
    context.*member(DestroyedMember{}) = true;
  }
  std::unique_lock lock(context.*member(MutexMember{}));
  (context.*member(ForksMember{})).clear();
  const auto pending = std::exchange(context.*member(PendingUsersMember{}), {});
  const auto confirmed = std::exchange(context.*member(ConfirmedUsersMember{}), {});
  const auto children = std::exchange(context.*member(PendingChildrenMember{}), {});
  lock.unlock();
  for (const auto& entry : pending) forget(entry.second->rref_);
  for (const auto& entry : confirmed) forget(entry.second.lock());
  for (const auto& entry : children) forget(entry.second);

  const std::lock_guard destroyed_lock(context.*member(DestroyedMutexMember{}));
  agent.swap(current);  // the one before ends when this function does
  context.*member(DestroyedMember{}) = false;
}

Making::Making(const rpc::RRefId& rref) : rref_(rref), use_(rpc::RRefContext::getInstance().genGloballyUniqueId()) {
  rpc::RRefContext::getInstance().addForkOfOwnerIfNotPresent(rref_, use_);
}

Making::~Making() {
  try {
    rpc::RRefContext::getInstance().delForkOfOwner(rref_, use_);
  } catch (const std::exception&) {
    // Another session has begun meanwhile, and the register was renewed.
  }
}

}  // namespace rpc_ext
