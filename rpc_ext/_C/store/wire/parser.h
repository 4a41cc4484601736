// Parser of the messages between a client and a store service; see message.h for their format.
//
// It checks each number against its limits before it uses it, and throws std::invalid_argument where a message makes no
// sense.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string_view>
#include <vector>

#include "store/wire/message.h"

namespace rpc_ext::store {

// The name of the service that a request is for.
std::string_view service_of(std::string_view body);

StoreRequest parse_request(std::string_view body, const std::vector<at::Tensor>& tensors);
Answer parse_answer(Verb verb, std::size_t count, std::string_view body, const std::vector<at::Tensor>& tensors);

}  // namespace rpc_ext::store
