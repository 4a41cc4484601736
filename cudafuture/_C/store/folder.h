// Operations on folders.
#pragma once

#include <string>
#include <vector>

namespace cudafuture::store {

// Makes the names in a folder durable. Throws Failure.
void sync_folder(const std::string& path);

void write_file(const std::string& path, const std::string& content);  // creates and syncs it; throws Failure

std::vector<std::string> names_in(const std::string& path);  // names of the folder's entries; throws Failure

}  // namespace cudafuture::store
