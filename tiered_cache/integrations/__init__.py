"""The cache under the interfaces of programs that bring one of their own."""
