#!/bin/sh
# The service and PostgreSQL in containers, up and healthy. What is given goes to `docker compose up`.
set -eu
cd "$(dirname "$0")"

# Containers see these files with the owner and the rights that they have here, and run as other users: the
# folder is what keeps others of this machine out. What is there stays as it is.
mkdir -p secrets corpora
chmod 700 secrets
password() {
    openssl rand -hex 32
}
token() {
    id=$(openssl rand -hex 6) && secret=$(password) && echo "frt_${id}_$secret"
}
make_secret() { # NAME, and what prints a new one: nothing is written where that fails
    if [ ! -s "secrets/$1" ]; then
        made=$("$2")
        printf '%s\n' "$made" > "secrets/$1"
        echo "made docker/secrets/$1"
    fi
    chmod 444 "secrets/$1"
}
make_secret fraternal_database_password password
make_secret fraternal_admin_token token
make_secret ray_auth_token password

docker compose up --build --detach --wait "$@"
echo "the service is up at http://$(docker compose port controller 8123)/; sign in with docker/secrets/fraternal_admin_token"
