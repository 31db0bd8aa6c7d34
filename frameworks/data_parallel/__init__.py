"""What data-parallel training needs beside the gradients: bookkeeping, and groups that run asynchronously."""
